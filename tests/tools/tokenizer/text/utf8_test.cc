// Bytes that are not UTF-8 become what bytes.decode("utf-8", "replace") makes of them in Python.
#include "tools/tokenizer/text/utf8.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tools/tokenizer/text/byte_alphabet.h"

namespace tessera::tools {
namespace {

std::string valid(std::string_view text) {
  std::string buffer;
  return std::string(valid_utf8(text, buffer));
}

TEST(Utf8, WhatIsUtf8StaysAsItIs) {
  const std::string text = "a\u00e9\u20ac\U0001F600\ud7ff\ue000\U0010ffff";
  std::string buffer;
  EXPECT_EQ(valid_utf8(text, buffer).data(), text.data());
  std::vector<char32_t> characters;
  for (std::size_t at = 0; at < text.size();) characters.push_back(next_character(text, at));
  EXPECT_EQ(characters,
            (std::vector<char32_t>{'a', 0xE9, 0x20AC, 0x1F600, 0xD7FF, 0xE000, 0x10FFFF}));
  std::string again;
  for (const char32_t c : characters) append_character(again, c);
  EXPECT_EQ(again, text);
}

TEST(Utf8, EachMaximalPartIsReplacedOnce) {
  const std::string r = "\ufffd";
  struct Case {
    std::string bytes, expected;
  };
  const Case cases[] = {
      {"\x80"
       "a",
       r + "a"},
      {"\xC0\xAF", r + r},
      {"\xC1\x81", r + r},
      {"\xE2\x82"
       "x",
       r + "x"},
      {"\xE2\x82", r},
      {"\xF0\x9F\x98"
       "x",
       r + "x"},
      {"\xE0\x80\x80", r + r + r},
      {"\xED\xA0\x80", r + r + r},
      {"\xF0\x80\x80\x80", r + r + r + r},
      {"\xF4\x90\x80\x80", r + r + r + r},
      {"\xF5\x80", r + r},
      {"\xFF\xFE", r + r},
      {"\xE2\xE2\x82\xAC", r + "\u20ac"},
      {"\xF1\x80\x80\xE1\x80\xC2\x62", r + r + r + "b"},
  };
  for (const Case& c : cases) EXPECT_EQ(valid(c.bytes), c.expected) << c.expected;
}

TEST(Utf8, PreviousCharactersAreFound) {
  const std::string text = "a\u00e9\U0001F600";
  EXPECT_EQ(previous_character(text, 7), 3u);
  EXPECT_EQ(previous_character(text, 3), 1u);
  EXPECT_EQ(previous_character(text, 1), 0u);
}

TEST(Utf8, AsciiIsToldFromTheRestAtEveryPlace) {
  for (std::size_t size = 0; size < 20; ++size) {
    std::string text(size, 'x');
    EXPECT_TRUE(is_ascii(text));
    for (char& c : text) {
      c = '\x80';
      EXPECT_FALSE(is_ascii(text));
      c = 'x';
    }
  }
}

// GPT-2's table: the space is U+0120, the end of a line U+010A, DEL U+0121.
TEST(ByteAlphabet, EachByteHasACharacterOfItsOwn) {
  const ByteAlphabet alphabet;
  EXPECT_EQ(alphabet.character_of(' '), 0x120u);
  EXPECT_EQ(alphabet.character_of('\n'), 0x10Au);
  EXPECT_EQ(alphabet.character_of(0x7F), 0x121u);
  EXPECT_EQ(alphabet.character_of(0xA0), 0x142u);
  EXPECT_EQ(alphabet.character_of(0xAD), 0x143u);
  EXPECT_EQ(alphabet.character_of('A'), U'A');
  EXPECT_EQ(alphabet.character_of(0xFF), 0xFFu);
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(alphabet.byte_of(alphabet.character_of(static_cast<unsigned char>(byte))), byte);
  }
  EXPECT_FALSE(alphabet.byte_of(' ').has_value());
  EXPECT_FALSE(alphabet.byte_of(0x144).has_value());
  EXPECT_EQ(alphabet.bytes_of("Ġa"), " a");
  EXPECT_FALSE(alphabet.bytes_of("Ġ a").has_value());
}

}  // namespace
}  // namespace tessera::tools
