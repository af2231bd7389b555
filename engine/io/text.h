// Text for people to read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::engine {

/// The items with `separator` between them. (fmt::join makes gcc 12 warn of what is not there.)
inline std::string join(std::span<const std::string> items, std::string_view separator) {
  std::string text;
  for (const std::string& item : items) {
    if (&item != items.data()) text += separator;
    text += item;
  }
  return text;
}

/// Whether all of `text` is UTF-8: shortest forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text);
/// `text` without the first bytes of a UTF-8 character whose others are missing at its end.
std::string_view without_cut_character(std::string_view text);

/// `text` on one line that cannot command a terminal. Control characters, characters that turn the
/// direction of writing or break lines, and bytes that are not UTF-8 become \n, \x1b or \u202e.
/// Backslashes stay, so that text may be escaped twice.
std::string escaped(std::string_view text);
/// Each line escaped, where all but the first must be indented by two spaces: another line
/// break is escaped, so that no name in a message can look like a message.
std::string escaped_lines(std::string_view text);
/// `text` escaped, of unknown length: at most `max_nbytes` of it, and how long it is.
std::string excerpt(std::string_view text, std::size_t max_nbytes = 200);

/// Levenshtein's edit distance: how many letters are put in, left out or replaced; or, where the
/// lengths alone make it `max` or more, no less than that.
std::size_t edit_distance(std::string_view a, std::string_view b, std::size_t max);

/// A time to wait: 3:07 (minutes), 12:03:04 (hours), "3 days 04:05" or "12.5 years".
std::string duration_text(double seconds);
/// "1,048,576"
std::string with_commas(std::int64_t n);

}  // namespace tessera::engine
