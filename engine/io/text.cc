#include "engine/io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

namespace tessera::engine {
namespace {

struct Character {
  char32_t code = 0;
  std::size_t nbytes = 0;  // 0: not UTF-8
};

/// The first character of `text`, which is not empty.
Character first_of(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {lead, 1};
  const std::size_t nbytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < nbytes) return {};
  char32_t code = lead & (0x7Fu >> nbytes);
  for (const char c : text.substr(1, nbytes - 1)) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte & 0xC0) != 0x80) return {};
    code = code << 6 | (byte & 0x3Fu);
  }
  const bool too_long = code < (nbytes == 4 ? 0x10000u : nbytes == 3 ? 0x800u : 0x80u);
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  if (too_long || surrogate || code > 0x10FFFF) return {};
  return {code, nbytes};
}

bool shows(char32_t code) {
  const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  // Marks, embeddings and isolates of direction; separators of lines and paragraphs.
  const bool layout = code == 0x061C || code == 0x200E || code == 0x200F ||
                      (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
  return !control && !layout;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t nbytes = first_of(text).nbytes;
    if (nbytes == 0) return false;
    text.remove_prefix(nbytes);
  }
  return true;
}

std::string_view without_cut_character(std::string_view text) {
  for (std::size_t n = 1; n <= std::min<std::size_t>(3, text.size()); ++n) {
    const auto byte = static_cast<unsigned char>(text[text.size() - n]);
    if ((byte & 0xC0) == 0x80) continue;  // not the first of its character
    const std::size_t nbytes = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : 2;
    const bool is_cut = byte >= 0xC2 && byte <= 0xF4 && nbytes > n;
    return is_cut ? text.substr(0, text.size() - n) : text;
  }
  return text;
}

std::string escaped(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto [code, nbytes] = first_of(text);
    if (nbytes == 0) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    } else if (shows(code)) {
      result += text.substr(0, nbytes);
    } else if (code == '\n' || code == '\r' || code == '\t') {
      result += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
    } else {
      const auto number = static_cast<unsigned>(code);
      result += nbytes == 1 ? fmt::format("\\x{:02x}", number) : fmt::format("\\u{:04x}", number);
    }
    text.remove_prefix(std::max<std::size_t>(nbytes, 1));
  }
  return result;
}

std::string escaped_lines(std::string_view text) {
  constexpr std::string_view kBreak = "\n  ";
  std::string result;
  for (std::size_t at; (at = text.find(kBreak)) != std::string_view::npos;) {
    result += escaped(text.substr(0, at));
    result += kBreak;
    text.remove_prefix(at + kBreak.size());
  }
  return result + escaped(text);
}

std::string excerpt(std::string_view text, std::size_t max_nbytes) {
  if (text.size() <= max_nbytes) return escaped(text);
  std::size_t end = max_nbytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return fmt::format("{}... ({} bytes)", escaped(text.substr(0, end)), text.size());
}

std::size_t edit_distance(std::string_view a, std::string_view b, std::size_t max) {
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

std::string with_commas(std::int64_t n) {
  const std::string digits = std::to_string(n);
  const std::size_t sign = n < 0 ? 1 : 0;
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > sign && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string duration_text(double seconds) {
  // In doubles, as no integer holds the longest that a run may ask for.
  const double s = std::floor(seconds), min = std::floor(s / 60), h = std::floor(min / 60);
  const double days = std::floor(h / 24);
  if (h < 1) return fmt::format("{:.0f}:{:02.0f}", min, s - min * 60);
  if (days < 1) return fmt::format("{:.0f}:{:02.0f}:{:02.0f}", h, min - h * 60, s - min * 60);
  if (days < 1000) {
    return fmt::format("{:.0f} day{} {:02.0f}:{:02.0f}", days, days == 1 ? "" : "s", h - days * 24,
                       min - h * 60);
  }
  return fmt::format("{:.3g} years", days / 365.25);
}

}  // namespace tessera::engine
