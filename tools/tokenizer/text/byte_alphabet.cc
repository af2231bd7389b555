#include "tools/tokenizer/text/byte_alphabet.h"

#include <cstddef>

#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {

ByteAlphabet::ByteAlphabet() {
  bytes_.fill(-1);
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_seen = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    const char32_t character = is_seen ? static_cast<char32_t>(byte) : next++;
    characters_[static_cast<std::size_t>(byte)] = character;
    bytes_[character] = byte;
  }
}

std::optional<unsigned char> ByteAlphabet::byte_of(char32_t character) const {
  if (character >= bytes_.size() || bytes_[character] < 0) return std::nullopt;
  return static_cast<unsigned char>(bytes_[character]);
}

std::optional<std::string> ByteAlphabet::bytes_of(std::string_view text) const {
  std::string bytes;
  for (std::size_t at = 0; at < text.size();) {
    const std::optional<unsigned char> byte = byte_of(next_character(text, at));
    if (!byte) return std::nullopt;
    bytes += static_cast<char>(*byte);
  }
  return bytes;
}

}  // namespace tessera::tools
