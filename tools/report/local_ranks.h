// Which ranks of a run are threads of this process: who keeps something for each rank keeps it for
// these alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tools/io/process_file.h"

namespace tessera::tools {

struct LocalRanks {
  int world_size = 1;  ///< ranks of all processes
  int first = 0;
  int count = world_size;
  int num_before = 0;       ///< of other processes on this host, which come before this one
  int num_on_host = count;  ///< of all processes on this host

  /// The numbers of this process's ranks, which follow one another.
  std::vector<int> all() const {
    std::vector<int> ranks(static_cast<std::size_t>(count));
    std::iota(ranks.begin(), ranks.end(), first);
    return ranks;
  }
  bool are_all() const { return count == world_size; }
  /// The ranks of all processes on this host, whose numbers are taken to follow one another.
  LocalRanks on_host() const {
    const int begin = std::max(0, std::min(first - num_before, world_size - num_on_host));
    return {.world_size = world_size,
            .first = begin,
            .count = num_on_host,
            .num_before = 0,
            .num_on_host = num_on_host};
  }
  /// `path` for what this process writes of its own ranks.
  std::string file_of(const std::string& path) const { return process_file(path, first); }
  /// Where `rank` stands among them. Throws InvalidArgument for one of another process.
  std::size_t index(int rank) const {
    engine::require(rank >= first && rank < first + count,
                    "[ranks] expected a rank of this process, {} to {}, got {}", first,
                    first + count - 1, rank);
    return static_cast<std::size_t>(rank - first);
  }
};

}  // namespace tessera::tools
