// UTF-8, one character at a time, and text made valid.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::tools {

/// What stands for bytes that are no text: U+FFFD.
inline constexpr char32_t kReplacement = 0xFFFD;

/// The character that begins at `text[at]`, of which there is one; `at` becomes where the next one
/// begins. Bytes that are not UTF-8 are kReplacement, one for each maximal part of a character
/// (Unicode 15, 3.9, table 3-8): what bytes.decode("utf-8", "replace") does in Python.
char32_t next_character(std::string_view text, std::size_t& at);
/// Where the character that ends before `end`, which is not 0, begins, in text that is UTF-8.
std::size_t previous_character(std::string_view text, std::size_t end);

void append_character(std::string& text, char32_t character);
std::string to_utf8(char32_t character);

/// Whether all bytes of `text` are below 128.
bool is_ascii(std::string_view text);

/// `text` with kReplacement for what is not UTF-8. `buffer` holds it where that is another text.
std::string_view valid_utf8(std::string_view text, std::string& buffer);

}  // namespace tessera::tools
