#include "tools/machine/environment.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <system_error>

namespace tessera::tools {

Environment environment() {
  Environment all;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    all.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return all;
}

std::vector<std::string> unread_variables(const Environment& environment) {
  std::vector<std::string> names;
  for (const auto& [name, value] : environment) {
    if (!name.starts_with("TESSERA_")) continue;
    if (std::ranges::find(kVariablesRead, name) == kVariablesRead.end()) names.push_back(name);
  }
  return names;
}

int count_of(std::string_view text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  return error == std::errc() && end == text.data() + text.size() ? std::max(count, 0) : 0;
}

}  // namespace tessera::tools
