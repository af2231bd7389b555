// Which neighbouring blocks are one unit: a function of their sizes alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "engine/parameter.h"
#include "shard/options.h"

namespace tessera::shard {

/// In what the sizes are counted in.
struct PackLimits {
  std::int64_t first;  ///< what the first pack is to reach
  std::int64_t other;  ///< what each other one is to reach
  /// A block larger than this is a pack of its own.
  std::int64_t alone = std::numeric_limits<std::int64_t>::max();
};

/// How many blocks each pack has: from the first block on, as many as it takes to reach the limit.
/// What is left at the end is a pack, too.
std::vector<std::size_t> pack(std::span<const std::int64_t> sizes, const PackLimits& limits);

/// How many of `blocks` each unit has, in their order: by unit_min_numel from the first block on,
/// or by bucket_nbytes from the last one on.
std::vector<std::size_t> packs_of(const std::vector<engine::Block*>& blocks,
                                  const FsdpOptions& options);

/// Throws InvalidArgument for sizes below 0 and for what contradicts the placement or each other.
void check_packing(const FsdpOptions& options);

}  // namespace tessera::shard
