// Regular expressions over text that is UTF-8, by PCRE2 with its compiler of machine code.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

// Of PCRE2.
struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace tessera::tools {

/// What a thread needs to search; for any number of expressions, one search at a time.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(RegexScratch&& other) noexcept;
  RegexScratch& operator=(RegexScratch&& other) noexcept;

 private:
  friend class Regex;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// One expression. It can be copied, and used by any number of threads.
class Regex {
 public:
  struct Range {
    std::size_t begin = 0, end = 0;
  };

  /// `pattern` as in tokenizer.json; `place`: file and key, for errors. Throws IoError, naming both
  /// and the pattern, for what is no expression or is not known here.
  Regex(const std::string& pattern, std::string place);

  /// File and key, for errors.
  const std::string& place() const { return place_; }

  /// Finds the first match in `text`, which must be UTF-8, that begins at `from` or later; an
  /// expression that asks what comes before a place sees the text before `from` as well. Throws
  /// IoError naming the pattern when the search takes too many steps.
  bool find(std::string_view text, std::size_t from, RegexScratch& scratch, Range& match) const;

  /// Calls `visit(range, is_match)` for all matches and for what lies between them, from the first
  /// byte to the last one. An empty match is one where none ends.
  template <class Visit>
  void visit_all(std::string_view text, RegexScratch& scratch, const Visit& visit) const {
    std::size_t from = 0, done = 0;
    bool has_match = false;
    for (Range match; from <= text.size() && find(text, from, scratch, match);) {
      if (match.begin == match.end && has_match && match.end == done) {
        from = after_character(text, from);
        continue;
      }
      if (done != match.begin) visit(Range{done, match.begin}, false);
      visit(match, true);
      from = done = match.end;
      has_match = true;
    }
    if (done != text.size()) visit(Range{done, text.size()}, false);
  }

 private:
  static std::size_t after_character(std::string_view text, std::size_t at);

  std::string pattern_, place_;
  std::shared_ptr<pcre2_real_code_8> code_;
  bool is_compiled_ = false;  // to machine code
};

}  // namespace tessera::tools
