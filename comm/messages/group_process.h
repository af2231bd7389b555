// Which processes a group has, and which of its ranks are in each.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// A process of a group.
struct GroupProcess {
  int process;             ///< of the transport
  std::vector<int> ranks;  ///< that it has in the group, in its order, as ranks of the world
  int number;              ///< that it has given to the group: see messages.h
};

/// All ranks of `processes`, in their order.
std::vector<int> ranks_of(const std::vector<GroupProcess>& processes);

/// What a rank says of itself in a split. `number`: what its process gives to the group of its
/// color.
struct SplitPlace {
  std::int32_t color, key, number;
};

/// What a split of `group` makes of the ranks of `color`, where the ranks of `group` say `places`.
/// Throws InvalidArgument, with the `name` of what is made, where ranks of one process would not
/// follow each other.
std::vector<GroupProcess> split_processes(const std::vector<GroupProcess>& group,
                                          const std::vector<SplitPlace>& places, int color,
                                          std::string_view name);

}  // namespace tessera::comm
