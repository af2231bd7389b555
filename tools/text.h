// Text for people to read.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tessera::tools {

/// The items with `separator` between them. (fmt::join makes gcc 12 warn of what is not there.)
inline std::string join(std::span<const std::string> items, std::string_view separator) {
  std::string text;
  for (const std::string& item : items) {
    if (&item != items.data()) text += separator;
    text += item;
  }
  return text;
}

}  // namespace tessera::tools
