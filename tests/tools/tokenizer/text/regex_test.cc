// Expressions mean what they mean to Oniguruma, or are refused by name.
#include "tools/tokenizer/text/regex.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tools/tokenizer/text/regex_syntax.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using testing::error_of;
using testing::has;

std::vector<std::string> matches(const std::string& pattern, std::string_view text) {
  const Regex regex(pattern, "file: key");
  RegexScratch scratch;
  std::vector<std::string> found;
  regex.visit_all(text, scratch, [&](Regex::Range range, bool is_match) {
    if (is_match) found.emplace_back(text.substr(range.begin, range.end - range.begin));
  });
  return found;
}

using Texts = std::vector<std::string>;

TEST(Regex, ClassesAreThoseOfUnicodeAsOnigurumaHasThem) {
  // U+180E is no white space, U+0085 and U+2028 are. (A failure prints none of these characters,
  // which end lines for some who read it.)
  EXPECT_TRUE(matches("\\s", "\u180e\u0085\u2028\u3000 x") ==
              (Texts{"\u0085", "\u2028", "\u3000", " "}));
  EXPECT_TRUE(matches("[^\\s]", "\u180e\u0085") == (Texts{"\u180e"}));
  EXPECT_TRUE(matches("\\S", "\u180e\u0085") == (Texts{"\u180e"}));
  // Fractions of Latin-1 are of words, superscript digits elsewhere are not; marks are.
  EXPECT_EQ(matches("\\w", "\u00bd\u2075e\u0301_-\u2167"),
            (Texts{"\u00bd", "e", "\u0301", "_", "\u2167"}));
  EXPECT_EQ(matches("[\\w-]", "a-."), (Texts{"a", "-"}));
  EXPECT_EQ(matches("\\W", "a\u2075"), (Texts{"\u2075"}));
  EXPECT_EQ(matches("\\d+", "1\u0661\u00b2"), (Texts{"1\u0661"}));
  // A script, and not its extensions, to which U+3001 belongs.
  EXPECT_EQ(matches("\\p{Han}", "\u6f22\u3001\u3042"), (Texts{"\u6f22"}));
  EXPECT_EQ(matches("\\p{^Han}", "\u6f22x"), (Texts{"x"}));
  EXPECT_EQ(matches("\\P{L}", "a1"), (Texts{"1"}));
  EXPECT_EQ(matches("\\u00e9|\\x{1F600}|\\x41", "\u00e9\U0001F600A"),
            (Texts{"\u00e9", "\U0001F600", "A"}));
}

TEST(Regex, LinesBeginAndEndAnywhere) {
  EXPECT_EQ(matches("^.|.$", "ab\ncd"), (Texts{"a", "b", "c", "d"}));
  EXPECT_EQ(matches(".", "a\n\r"), (Texts{"a", "\r"}));
}

TEST(Regex, CasesAreThoseOfUnicode) {
  EXPECT_EQ(matches("(?i:'s)", "'S'\u017f's"), (Texts{"'S", "'\u017f", "'s"}));
  EXPECT_EQ(matches("(?i)k", "K\u212a"), (Texts{"K", "\u212a"}));
}

TEST(Regex, EmptyMatchesEndWhereNoMatchDoes) {
  EXPECT_EQ(matches("x*", "axb"), (Texts{"", "x", ""}));
  EXPECT_EQ(matches("(?=b)", "abb"), (Texts{"", ""}));
  EXPECT_EQ(matches("x*", "\u00e9"), (Texts{"", ""}));
}

TEST(Regex, LiteralsMatchThemselvesAlone) {
  const std::string text = "a.[x]*\\n \u00e9\n(?:^$)|-";
  EXPECT_EQ(matches(literal_pattern(text), "x" + text + "y"), (Texts{text}));
}

TEST(Regex, WhatHasTwoMeaningsIsRefusedByName) {
  const char* const refused[] = {
      "\\bx",   "\\B",     "\\A",    "\\z",     "\\h",      "\\R",         "\\X",    "\\K",
      "\\G",    "\\Qx\\E", "(a)\\1", "[\\W]",   "[a[b]]",   "[[:alpha:]]", "[a&&b]", "[]a]",
      "(?m:x)", "(?s)x",   "a(?i)b", "(*UCP)a", "a{,2}",    "a{1,2}+",     "\\pL",   "\\p{L",
      "[ab",    "a\\",     "\\x9F",  "\\u12",   "(?P<n>a)", "(?#x)",
  };
  for (const char* const pattern : refused) {
    EXPECT_TRUE(has(error_of<IoError>([&] { Regex(pattern, "file.json: key"); }),
                    {"[tokenizer] expected a regular expression", "(file.json: key)"}))
        << pattern;
  }
}

TEST(Regex, WhatIsNoExpressionIsRefused) {
  for (const char* const pattern : {"(", "a)", "*", "\\p{Nonsense}", "[b-a]", "a{2,1}"}) {
    EXPECT_TRUE(has(error_of<IoError>([&] { Regex(pattern, "file.json: key"); }),
                    {"[tokenizer] expected a regular expression, got", pattern, " at byte ",
                     "(file.json: key)"}))
        << pattern;
  }
  EXPECT_TRUE(has(error_of<IoError>([] { Regex(std::string(1 << 17, 'a'), "file.json: key"); }),
                  {"of at most 65536 bytes, got 131072"}));
}

TEST(Regex, ASearchWithoutAnEndIsAnErrorThatNamesThePattern) {
  EXPECT_TRUE(
      has(error_of<IoError>([] { matches("(?:a+)+[^ac]", std::string(40, 'a') + "c"); }),
          {"[tokenizer] expected (?:a+)+[^ac] to end on the text", "limit", "(file: key)"}));
  // What goes back on a long text has room for it.
  EXPECT_EQ(matches("(?:a|b)*c", std::string(100000, 'a') + "c").size(), 1u);
}

}  // namespace
}  // namespace tessera::tools
