#include "tools/tokenizer/text/regex_syntax.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::IoError;

bool is_letter_or_digit(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool is_hex(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

// What \w is in Oniguruma: the last ones are superscript digits and fractions of Latin-1.
const std::string kOfWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";

class Translator {
 public:
  Translator(std::string_view pattern, std::string_view place) : pattern_(pattern), place_(place) {}

  std::string all() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape(false);
      } else if (c == '[') {
        bracket();
      } else if (starts("(?")) {
        group();
      } else if (starts("(*") || starts("{,")) {
        refuse(pattern_.substr(at_, 2));
      } else if (c == '}') {
        copy();
        if (at_ < pattern_.size() && pattern_[at_] == '+') refuse("}+, which has two meanings");
      } else {
        copy();
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail<IoError>("[tokenizer] expected a regular expression that is known here, got {} in {} ({})",
                  what, engine::excerpt(pattern_), place_);
  }
  bool starts(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  void copy(std::size_t n = 1) {
    out_ += pattern_.substr(at_, n);
    at_ += std::min(n, pattern_.size() - at_);
  }

  // From a backslash on.
  void escape(bool in_class) {
    if (at_ + 1 == pattern_.size()) refuse("a backslash at the end");
    const char c = pattern_[at_ + 1];
    const auto say = [&](std::string_view words) {
      out_ += words;
      at_ += 2;
    };
    switch (c) {
      case 's':
        return say("\\p{White_Space}");
      case 'S':
        return say("\\P{White_Space}");
      case 'w':
        return say(in_class ? kOfWord : "[" + kOfWord + "]");
      case 'W':
        if (in_class) refuse("\\W in a class");
        return say("[^" + kOfWord + "]");
      case 'p':
      case 'P':
        return property();
      case 'd':
      case 'D':
      case 'n':
      case 'r':
      case 't':
      case 'f':
        return copy(2);
      case 'u':
      case 'x':
        return code_point();
      default:
        if (is_letter_or_digit(c)) refuse(pattern_.substr(at_, 2));
        return copy(2);
    }
  }

  // \p{L} and the like mean the same; what is longer is a script.
  void property() {
    const std::size_t end = pattern_.find('}', at_);
    if (!pattern_.substr(at_ + 2).starts_with('{') || end == std::string_view::npos) {
      refuse("\\p without a name in braces");
    }
    std::string_view name = pattern_.substr(at_ + 3, end - at_ - 3);
    out_ += pattern_.substr(at_, 3);
    if (name.starts_with('^')) {
      out_ += '^';
      name.remove_prefix(1);
    }
    if (name.size() > 2) out_ += "sc:";
    out_ += name;
    out_ += '}';
    at_ = end + 1;
  }

  // \x{1F600}, \u and four digits, or \x and two, which are a character below 128 alone.
  void code_point() {
    if (starts("\\x{")) return copy(3);
    const std::size_t num_digits = pattern_[at_ + 1] == 'u' ? 4 : 2;
    const std::string_view digits = pattern_.substr(std::min(at_ + 2, pattern_.size()), num_digits);
    const bool is_good = digits.size() == num_digits && std::ranges::all_of(digits, is_hex);
    if (!is_good || (num_digits == 2 && digits[0] > '7')) refuse(pattern_.substr(at_, 4));
    out_.append("\\x{").append(digits).append("}");
    at_ += 2 + num_digits;
  }

  void bracket() {
    copy();
    if (starts("^")) copy();
    if (starts("]")) refuse("a class that begins with ]");
    while (at_ < pattern_.size() && pattern_[at_] != ']') {
      if (pattern_[at_] == '[') {
        refuse("[ in a class");
      } else if (starts("&&")) {
        refuse("&& in a class");
      } else if (pattern_[at_] == '\\') {
        escape(true);
      } else {
        copy();
      }
    }
    if (at_ == pattern_.size()) refuse("a class without an end");
    copy();
  }

  // From "(?" on.
  void group() {
    constexpr std::array<std::string_view, 7> kKnown = {"(?:",  "(?=",  "(?!", "(?>",
                                                        "(?<=", "(?<!", "(?i:"};
    for (const std::string_view known : kKnown) {
      if (starts(known)) return copy(known.size());
    }
    if (starts("(?i)") && at_ == 0) return copy(4);
    refuse(pattern_.substr(at_, 4));
  }

  std::string_view pattern_, place_;
  std::size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string to_pcre2(std::string_view pattern, std::string_view place) {
  return Translator(pattern, place).all();
}

std::string literal_pattern(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    const bool is_plain = is_letter_or_digit(c) || static_cast<unsigned char>(c) >= 0x80;
    if (!is_plain) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

}  // namespace tessera::tools
