#include "tools/data/first_fit.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "engine/error.h"

namespace tessera::tools {

// A tree whose leaves are bins, as many as there may be: each node knows the largest room below it.
// Those of node i are 2 i and 2 i + 1, the first leaf is half of the nodes.
std::vector<std::int64_t> first_fit(std::span<const std::int32_t> sizes, std::int64_t capacity) {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  engine::require(capacity >= 1 && capacity < kMax,
                  "[first_fit] expected a capacity in [1, 2^31), got {}", capacity);
  const std::size_t num_leaves = std::bit_ceil(sizes.size());
  std::vector<std::int32_t> room(2 * num_leaves, static_cast<std::int32_t>(capacity));
  std::vector<std::int64_t> bins;
  bins.reserve(sizes.size());
  for (const std::int32_t size : sizes) {
    engine::require(size >= 1 && size <= capacity, "[first_fit] expected sizes in [1, {}], got {}",
                    capacity, size);
    std::size_t node = 1;
    while (node < num_leaves) {
      node *= 2;
      if (room[node] < size) ++node;
    }
    bins.push_back(static_cast<std::int64_t>(node - num_leaves));
    room[node] -= size;
    for (node /= 2; node >= 1; node /= 2) room[node] = std::max(room[2 * node], room[2 * node + 1]);
  }
  return bins;
}

}  // namespace tessera::tools
