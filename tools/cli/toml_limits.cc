#include "tools/cli/toml_limits.h"

#include <algorithm>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

constexpr int kMaxParts = 16;
constexpr int kMaxLevels = 16;
constexpr int kMaxItems = 4096;
constexpr const char* kParts = "at most 16 parts of a name";
constexpr const char* kLevels = "at most 16 levels of brackets";
constexpr const char* kItems = "at most 4096 keys, tables and elements";

/// Where the string that starts at `begin` has its last quote; the end of `text` if it has none,
/// where the parser stops too.
std::size_t last_quote(std::string_view text, std::size_t begin) {
  const char quote = text[begin];
  const std::string_view three = quote == '"' ? R"(""")" : "'''";
  const bool is_long = text.substr(begin).starts_with(three);
  for (std::size_t i = begin + (is_long ? 3 : 1); i < text.size(); ++i) {
    if (quote == '"' && text[i] == '\\') {
      ++i;
    } else if (!is_long && text[i] == '\n') {
      break;
    } else if (!is_long && text[i] == quote) {
      return i;
    } else if (is_long && text.substr(i).starts_with(three)) {
      // Up to two quotes more are still in the string.
      std::size_t last = i + 2;
      while (last < i + 4 && last + 1 < text.size() && text[last + 1] == quote) ++last;
      return last;
    }
  }
  return text.size();
}

/// Whether the table header that starts at `begin` has a name, or ends where the parser sees it.
bool has_name(std::string_view text, std::size_t begin) {
  const auto skip_blanks = [&](std::size_t i) {
    return std::min(text.find_first_not_of(" \t", i), text.size());
  };
  std::size_t i = skip_blanks(begin + 1);
  if (i < text.size() && text[i] == '[') i = skip_blanks(i + 1);
  constexpr std::string_view kFirst =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_\"']";
  return i == text.size() || kFirst.find(text[i]) != std::string_view::npos;
}

}  // namespace

void check_toml_limits(std::string_view text, std::string_view path) {
  int num_parts = 1, num_levels = 0, num_items = 0;
  bool in_value = false;  // after the = of this line
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto check = [&](bool ok, std::string_view expected, std::string_view got = "more") {
      if (ok) return;
      const auto line = 1 + std::ranges::count(text.substr(0, i), '\n');
      engine::fail<engine::IoError>("[toml] expected {}, got {} ({}:{})", expected, got,
                                    engine::escaped(path), line);
    };
    const char c = text[i];
    if (c == '"' || c == '\'') {
      i = last_quote(text, i);
    } else if (c == '#') {
      i = std::min(text.find('\n', i), text.size()) - 1;
    } else if (c == '.') {
      check(++num_parts <= kMaxParts, kParts);
    } else if (std::string_view("[]{}=,\n").find(c) != std::string_view::npos) {
      num_parts = 1;
      if (c == '\n') in_value = false;
      if (c == '=') in_value = true;
      if (c == ']' || c == '}') --num_levels;
      if (c == '[' && num_levels == 0 && !in_value)
        check(has_name(text, i), "a name after [", "none");
      if (c == '[' || c == '{') check(++num_levels <= kMaxLevels, kLevels);
      if (c != '\n' && c != ']' && c != '}') check(++num_items <= kMaxItems, kItems);
    }
  }
}

}  // namespace tessera::tools
