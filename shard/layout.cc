#include "shard/layout.h"

#include <algorithm>
#include <limits>

#include "engine/error.h"

namespace tessera::shard {
namespace {

std::int64_t round_up(std::int64_t n) {
  return (n + kAlignmentNumel - 1) / kAlignmentNumel * kAlignmentNumel;
}

}  // namespace

Layout::Layout(std::span<const std::int64_t> numels, int num_shards)
    : num_shards_(num_shards), numels_(numels.begin(), numels.end()) {
  engine::require(num_shards >= 1, "[layout] expected at least 1 shard, got {}", num_shards);
  const std::int64_t limit = std::numeric_limits<std::int64_t>::max() / 16;
  std::int64_t offset = 0;
  for (const std::int64_t numel : numels_) {
    engine::require(numel >= 0, "[layout] expected a size of at least 0, got {}", numel);
    engine::require(numel < limit && offset < limit, "[layout] expected fewer than {} elements",
                    limit);
    offsets_.push_back(offset);
    offset += round_up(numel);
    value_numel_ += numel;
  }
  shard_numel_ = round_up((offset + num_shards - 1) / num_shards);
}

std::vector<Segment> Layout::segments(int rank) const {
  engine::require(rank >= 0 && rank < num_shards_, "[layout] expected a rank below {}, got {}",
                  num_shards_, rank);
  return segments(Range{rank * shard_numel_, shard_numel_});
}

std::vector<Segment> Layout::segments(const Range& range) const {
  const std::int64_t begin = range.begin, end = range.begin + range.numel;
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < numels_.size(); ++i) {
    const std::int64_t first = std::max(begin, offsets_[i]);
    const std::int64_t last = std::min(end, offsets_[i] + numels_[i]);
    if (first < last) segments.push_back({i, first - offsets_[i], first - begin, last - first});
  }
  return segments;
}

Range Layout::part(int part, int num_parts) const {
  engine::require(num_parts >= 1 && num_shards_ % num_parts == 0 && part >= 0 && part < num_parts,
                  "[layout] expected a part of parts that divide {} shards, got {} of {}",
                  num_shards_, part, num_parts);
  const std::int64_t numel = flat_numel() / num_parts;
  return {part * numel, numel};
}

}  // namespace tessera::shard
