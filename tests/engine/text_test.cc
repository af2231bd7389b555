#include "engine/io/text.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace tessera::engine {
namespace {

using namespace std::literals;

TEST(Text, IsUtf8OnlyInShortestFormsOfCharacters) {
  for (const std::string_view good :
       {""sv, "a\0b"sv, "\x7F"sv, "\xC2\x80"sv, "\xDF\xBF"sv, "\xE0\xA0\x80"sv, "\xED\x9F\xBF"sv,
        "\xEE\x80\x80"sv, "\xEF\xBF\xBF"sv, "\xF0\x90\x80\x80"sv, "\xF4\x8F\xBF\xBF"sv}) {
    EXPECT_TRUE(is_utf8(good)) << escaped(good);
  }
  for (const std::string_view bad :
       {"\x80"sv, "\xBF"sv, "\xC0\x80"sv, "\xC1\xBF"sv, "\xC3"sv, "\xC3("sv, "\xE0\x9F\xBF"sv,
        "\xED\xA0\x80"sv, "\xED\xBF\xBF"sv, "\xE2\x82"sv, "\xF0\x8F\xBF\xBF"sv,
        "\xF4\x90\x80\x80"sv, "\xF5\x80\x80\x80"sv, "\xFF"sv, "good\xFE"sv}) {
    EXPECT_FALSE(is_utf8(bad)) << escaped(bad);
  }
}

TEST(Text, EscapedCannotCommandATerminal) {
  EXPECT_EQ(escaped("plain, caf\xC3\xA9 \xF0\x9F\x99\x82 \\ \"'"),
            "plain, caf\xC3\xA9 \xF0\x9F\x99\x82 \\ \"'");
  EXPECT_EQ(escaped("a\x1B[2J\r\n\tb\x7F\0c"sv), "a\\x1b[2J\\r\\n\\tb\\x7f\\x00c");
  EXPECT_EQ(escaped("\xC2\x9B[2J \xE2\x80\xAE \xE2\x80\xA8 \xE2\x81\xA6"),
            "\\u009b[2J \\u202e \\u2028 \\u2066");
  EXPECT_EQ(escaped("\x9B[2J \xE2\x80 \xC0\xAF \xFF"), "\\x9b[2J \\xe2\\x80 \\xc0\\xaf \\xff");
  EXPECT_EQ(escaped(escaped("\n\x1B\xFF")), escaped("\n\x1B\xFF"));
}

TEST(Text, EscapedIsAllThatCommandsAndNothingElse) {
  for (const std::string_view shown :
       {" "sv, "~"sv, "\xC2\xA0"sv, "\xD8\x9B"sv, "\xD8\x9D"sv, "\xE2\x80\x8D"sv, "\xE2\x80\x90"sv,
        "\xE2\x80\xA7"sv, "\xE2\x80\xAF"sv, "\xE2\x81\xA5"sv, "\xE2\x81\xAA"sv}) {
    EXPECT_EQ(escaped(shown), shown);
  }
  EXPECT_EQ(escaped("\x1F\xC2\x80\xC2\x9F"), "\\x1f\\u0080\\u009f");
  EXPECT_EQ(escaped("\xD8\x9C\xE2\x80\x8E\xE2\x80\x8F"), "\\u061c\\u200e\\u200f");
  EXPECT_EQ(escaped("\xE2\x80\xA8\xE2\x80\xAE\xE2\x81\xA6\xE2\x81\xA9"),
            "\\u2028\\u202e\\u2066\\u2069");
}

TEST(Text, LinesStayLinesWhereTheyAreIndented) {
  EXPECT_EQ(escaped_lines("[a] got two:\n  b\x1B\n  c\nerror: d\n e\n"),
            "[a] got two:\n  b\\x1b\n  c\\nerror: d\\n e\\n");
}

TEST(Text, ExcerptsAreShortAndCutNoCharacter) {
  EXPECT_EQ(excerpt("abc\n", 4), "abc\\n");
  EXPECT_EQ(excerpt("abcde", 4), "abcd... (5 bytes)");
  EXPECT_EQ(excerpt("abc\xC3\xA9", 4), "abc... (5 bytes)");
  EXPECT_EQ(excerpt("ab\xF0\x9F\x99\x82", 5), "ab... (6 bytes)");
  EXPECT_LT(excerpt(std::string(1 << 20, '\xFF')).size(), 1000u);
}

TEST(Text, ACharacterIsCutWhereOthersOfItsBytesAreMissing) {
  EXPECT_EQ(without_cut_character("abc"), "abc");
  EXPECT_EQ(without_cut_character(""), "");
  EXPECT_EQ(without_cut_character("a\xC3\xA9"), "a\xC3\xA9");
  EXPECT_EQ(without_cut_character("a\xC3"), "a");
  EXPECT_EQ(without_cut_character("a\xF0\x9F\x99"), "a");
  EXPECT_EQ(without_cut_character("\xF0\x9F\x99\x82"), "\xF0\x9F\x99\x82");
  EXPECT_EQ(without_cut_character("a\x99\x99\x99\x99"), "a\x99\x99\x99\x99");
  EXPECT_EQ(without_cut_character("\xC1"), "\xC1");  // of no character
}

TEST(Text, EditsAreCounted) {
  EXPECT_EQ(edit_distance("wte.weight", "wte.weight", 9), 0u);
  EXPECT_EQ(edit_distance("ln_1", "ln1", 9), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting", 9), 3u);
  EXPECT_GE(edit_distance("a", "abcdefgh", 3), 3u);
}

TEST(Text, DurationsAreReadable) {
  EXPECT_EQ(duration_text(0), "0:00");
  EXPECT_EQ(duration_text(59.9), "0:59");
  EXPECT_EQ(duration_text(187), "3:07");
  EXPECT_EQ(duration_text(3599.99), "59:59");
  EXPECT_EQ(duration_text(3600), "1:00:00");
  EXPECT_EQ(duration_text(12 * 3600 + 3 * 60 + 4), "12:03:04");
  EXPECT_EQ(duration_text(86399), "23:59:59");
  EXPECT_EQ(duration_text(86400 + 3600 + 120), "1 day 01:02");
  EXPECT_EQ(duration_text(30.0 * 86400 + 59 * 60), "30 days 00:59");
  EXPECT_EQ(duration_text(1000.0 * 86400), "2.74 years");
  EXPECT_EQ(duration_text(9.2e18 * 300), "8.75e+13 years");
}

}  // namespace
}  // namespace tessera::engine
