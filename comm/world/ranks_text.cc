#include "comm/world/ranks_text.h"

#include <fmt/core.h>

#include <cstddef>

namespace tessera::comm {

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr int kMaxRanges = 8;
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
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

}  // namespace tessera::comm
