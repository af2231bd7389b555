#include "tools/cli/option_names.h"

#include <algorithm>
#include <cstddef>

#include "engine/io/text.h"

namespace tessera::tools {

std::string_view section_of(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? "" : name.substr(0, dot);
}

std::string_view key_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

std::string_view nearest_name(std::string_view name, const std::vector<std::string_view>& names) {
  std::string_view nearest;
  constexpr std::size_t kFar = 3;  // is not a slip of the keyboard
  // Twice, so that of two as near the one of that section is meant.
  std::size_t nearest_distance = 2 * kFar;
  for (const std::string_view other : names) {
    const std::size_t near =
        std::min(2 * engine::edit_distance(other, name, kFar),
                 2 * engine::edit_distance(key_of(other), key_of(name), kFar) + 3);
    if (near < nearest_distance) {
      nearest = other;
      nearest_distance = near;
    }
  }
  return nearest;
}

}  // namespace tessera::tools
