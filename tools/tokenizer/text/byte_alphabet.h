// The alphabet of byte-level tokenizers, which write each byte as a character that can be seen.
//
// Bytes that are printable characters of Latin-1 are these characters, the space not among them;
// the other bytes are, in order, the characters from U+0100 on. (GPT-2's encoder.)
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::tools {

class ByteAlphabet {
 public:
  ByteAlphabet();

  char32_t character_of(unsigned char byte) const { return characters_[byte]; }
  /// The byte that `character` stands for, if it stands for any.
  std::optional<unsigned char> byte_of(char32_t character) const;
  /// The bytes that all characters of `text` stand for; nothing if one stands for none.
  std::optional<std::string> bytes_of(std::string_view text) const;

 private:
  std::array<char32_t, 256> characters_{};
  std::array<int, 512> bytes_{};  // -1: none
};

}  // namespace tessera::tools
