#include "shard/packing.h"

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::shard {

using engine::require;

std::vector<std::size_t> pack(std::span<const std::int64_t> sizes, const PackLimits& limits) {
  std::vector<std::size_t> packs;
  std::size_t num_blocks = 0;  // of the pack that is open
  std::int64_t sum = 0;
  const auto close = [&] {
    packs.push_back(std::exchange(num_blocks, 0));
    sum = 0;
  };
  for (const std::int64_t size : sizes) {
    if (size > limits.alone && num_blocks > 0) close();
    ++num_blocks;
    sum += size;
    if (sum >= (packs.empty() ? limits.first : limits.other)) close();
  }
  if (num_blocks > 0) close();
  return packs;
}

std::vector<std::size_t> packs_of(const std::vector<engine::Block*>& blocks,
                                  const FsdpOptions& options) {
  const std::int64_t nbytes = options.bucket_nbytes;
  const bool is_bucket = nbytes > 0;
  std::vector<std::int64_t> sizes;
  for (const engine::Block* block : blocks) {
    std::int64_t numel = 0;
    for (const engine::Parameter* p : block->parameters) {
      if (options.ignores && options.ignores(*p)) continue;
      if (p->trainable || !is_bucket) numel += p->shape.numel();
    }
    sizes.push_back(is_bucket ? numel * engine::size_of(options.precision.reduce) : numel);
  }
  if (!is_bucket) return pack(sizes, {options.unit_min_numel, options.unit_min_numel});
  std::reverse(sizes.begin(), sizes.end());
  std::vector<std::size_t> packs =
      pack(sizes, {std::min(options.first_bucket_nbytes, nbytes), nbytes, nbytes});
  std::reverse(packs.begin(), packs.end());
  return packs;
}

void check_packing(const FsdpOptions& options) {
  require(options.unit_min_numel >= 0, "[fsdp] expected unit_min_numel of at least 0, got {}",
          options.unit_min_numel);
  require(options.bucket_nbytes >= 0, "[fsdp] expected bucket_nbytes of at least 0, got {}",
          options.bucket_nbytes);
  require(options.first_bucket_nbytes >= 0,
          "[fsdp] expected first_bucket_nbytes of at least 0, got {}", options.first_bucket_nbytes);
  if (options.bucket_nbytes == 0) {
    const std::int64_t first = options.first_bucket_nbytes;
    require(first == 0 || first == FsdpOptions{}.first_bucket_nbytes,
            "[fsdp] expected bucket_nbytes with first_bucket_nbytes, got 0 and {}", first);
    return;
  }
  require(options.placement.parameters == Place::kWhole,
          "[fsdp] expected bucket_nbytes with parameters that are whole on every rank only, got {} "
          "with {}: there unit_min_numel packs, as a unit is what is gathered as well",
          options.bucket_nbytes, to_string(options.placement));
  require(options.unit_min_numel == 0,
          "[fsdp] expected bucket_nbytes or unit_min_numel, got {} and {}", options.bucket_nbytes,
          options.unit_min_numel);
}

}  // namespace tessera::shard
