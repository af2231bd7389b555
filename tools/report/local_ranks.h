// Which ranks of a run are threads of this process: who keeps something for each rank keeps it for
// these alone.
#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "engine/error.h"

namespace tessera::tools {

struct LocalRanks {
  int world_size = 1;  ///< ranks of all processes
  int first = 0;
  int count = world_size;

  /// Their numbers, which follow one another.
  std::vector<int> all() const {
    std::vector<int> ranks(static_cast<std::size_t>(count));
    std::iota(ranks.begin(), ranks.end(), first);
    return ranks;
  }
  bool are_all() const { return count == world_size; }
  /// Where `rank` stands among them. Throws InvalidArgument for one of another process.
  std::size_t index(int rank) const {
    engine::require(rank >= first && rank < first + count,
                    "[ranks] expected a rank of this process, {} to {}, got {}", first,
                    first + count - 1, rank);
    return static_cast<std::size_t>(rank - first);
  }
};

}  // namespace tessera::tools
