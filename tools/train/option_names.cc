#include "tools/train/option_names.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace tessera::tools {
namespace {

/// Levenshtein's edit distance, or, where the lengths alone make it `max` or more, no less than
/// that.
std::size_t distance(std::string_view a, std::string_view b, std::size_t max) {
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) >= max) return max;
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] != b[j] ? 1 : 0);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

}  // namespace

std::string_view section_of(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? "" : name.substr(0, dot);
}

std::string_view key_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

std::string_view nearest_name(std::string_view name, const std::vector<std::string_view>& names) {
  std::string_view nearest;
  std::size_t nearest_distance = 3;  // farther is not a slip of the keyboard
  for (const std::string_view other : names) {
    const std::size_t near = std::min(distance(other, name, nearest_distance),
                                      distance(key_of(other), key_of(name), nearest_distance) + 1);
    if (near < nearest_distance) {
      nearest = other;
      nearest_distance = near;
    }
  }
  return nearest;
}

}  // namespace tessera::tools
