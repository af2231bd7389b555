// Ranks and processes as messages name them.
#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// "rank 2", "ranks 2, 5-7" or, when there are too many of these, "ranks 2, 5-7 and 90 more".
/// `ranks` ascend.
std::string ranks_text(const std::vector<int>& ranks);
/// "process 2", "processes 2, 5-7" and so on.
std::string processes_text(const std::vector<int>& processes);

/// A rank that others wait for.
struct AbsentRank {
  int rank = 0;
  bool departed = false;       ///< it has left the group
  std::string last = {};       ///< the call that it was last seen in
  std::string elsewhere = {};  ///< where it waits in another group; empty: nowhere
};
/// "ranks 2, 5-7 are missing, last seen in #11 all_gather f32 x 4 'h.0'", one for each call that
/// they were last seen in, in the order of ranks. Of bounded length: the first few.
std::string absent_text(const std::vector<AbsentRank>& absent);

}  // namespace tessera::comm
