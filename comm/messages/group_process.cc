#include "comm/messages/group_process.h"

#include <algorithm>
#include <functional>

#include "engine/error.h"

namespace tessera::comm {

std::vector<int> ranks_of(const std::vector<GroupProcess>& processes) {
  std::vector<int> ranks;
  for (const GroupProcess& p : processes) ranks.insert(ranks.end(), p.ranks.begin(), p.ranks.end());
  return ranks;
}

std::vector<GroupProcess> split_processes(const std::vector<GroupProcess>& group,
                                          const std::vector<SplitPlace>& places, int color,
                                          std::string_view name) {
  struct Member {
    int process, rank;
    SplitPlace place;
  };
  std::vector<Member> members;
  auto place = places.begin();
  for (const GroupProcess& p : group) {
    for (const int rank : p.ranks) members.push_back({p.process, rank, *place++});
  }
  std::erase_if(members, [&](const Member& m) { return m.place.color != color; });
  std::ranges::stable_sort(members, {}, [](const Member& m) { return m.place.key; });
  std::vector<GroupProcess> made;
  for (const Member& m : members) {
    if (made.empty() || made.back().process != m.process) {
      const auto same = std::ranges::find(made, m.process, &GroupProcess::process);
      if (same != made.end()) {
        engine::fail(
            "[split] expected ranks of one process next to each other, got ranks of others "
            "between rank {} and rank {} ({})",
            same->ranks.back(), m.rank, name);
      }
      made.push_back({m.process, {}, m.place.number});
    }
    made.back().ranks.push_back(m.rank);
  }
  return made;
}

}  // namespace tessera::comm
