#include "comm/world/ranks_text.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace tessera::comm {
namespace {

std::string cut(std::string_view call) {
  constexpr std::size_t kMaxCall = 100;
  return fmt::format("{}{}", call.substr(0, kMaxCall), call.size() > kMaxCall ? "..." : "");
}

std::string text_of(const std::vector<int>& ranks, const char* one, const char* several) {
  constexpr int kMaxRanges = 8;
  std::string text = ranks.size() == 1 ? one : several;
  std::size_t i = 0;
  for (int range = 0; i < ranks.size() && range < kMaxRanges; ++range) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += fmt::format("{} {}", range == 0 ? "" : ",", ranks[i]);
    if (last > i) text += fmt::format("-{}", ranks[last]);
    i = last + 1;
  }
  return i < ranks.size() ? fmt::format("{} and {} more", text, ranks.size() - i) : text;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) { return text_of(ranks, "rank", "ranks"); }

std::string processes_text(const std::vector<int>& processes) {
  return text_of(processes, "process", "processes");
}

std::string absent_text(const std::vector<AbsentRank>& absent) {
  struct Group {
    const AbsentRank* first;
    std::vector<int> ranks;
  };
  std::vector<Group> groups;
  for (const AbsentRank& a : absent) {
    auto group = std::ranges::find_if(groups, [&](const Group& g) {
      return g.first->departed == a.departed && g.first->last == a.last &&
             g.first->elsewhere == a.elsewhere;
    });
    if (group == groups.end()) group = groups.insert(group, {&a, {}});
    group->ranks.push_back(a.rank);
  }
  constexpr std::size_t kMaxGroups = 4;
  std::string text;
  std::size_t num_more = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& [first, ranks] = groups[g];
    if (g >= kMaxGroups) {
      num_more += ranks.size();
      continue;
    }
    const bool is_one = ranks.size() == 1;
    const char* what = first->departed ? is_one ? "has left the group" : "have left the group"
                       : is_one        ? "is missing"
                                       : "are missing";
    text += fmt::format("{}{} {}, last seen in {}", g == 0 ? "" : "; ", ranks_text(ranks), what,
                        cut(first->last));
    if (!first->elsewhere.empty()) text += fmt::format(", waiting in {}", cut(first->elsewhere));
  }
  if (num_more > 0) text += fmt::format("; and {} more ranks", num_more);
  return text;
}

}  // namespace tessera::comm
