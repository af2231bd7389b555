#include "tools/tokenizer/text/utf8.h"

#include <cstdint>
#include <cstring>

#include "engine/io/text.h"

namespace tessera::tools {
namespace {

unsigned char byte_at(std::string_view text, std::size_t at) {
  return static_cast<unsigned char>(text[at]);
}

/// What the first byte of a character says: how many follow it, and the range of the next one.
struct Lead {
  int num_more = 0;
  unsigned char min = 0x80, max = 0xBF;
};

/// False for a byte that begins no character.
bool read_lead(unsigned char byte, Lead& lead) {
  if (byte >= 0xC2 && byte <= 0xDF) {
    lead.num_more = 1;
  } else if (byte >= 0xE0 && byte <= 0xEF) {
    lead.num_more = 2;
    if (byte == 0xE0) lead.min = 0xA0;  // shorter forms
    if (byte == 0xED) lead.max = 0x9F;  // surrogates
  } else if (byte >= 0xF0 && byte <= 0xF4) {
    lead.num_more = 3;
    if (byte == 0xF0) lead.min = 0x90;
    if (byte == 0xF4) lead.max = 0x8F;  // above U+10FFFF
  } else {
    return false;
  }
  return true;
}

}  // namespace

char32_t next_character(std::string_view text, std::size_t& at) {
  const unsigned char first = byte_at(text, at++);
  if (first < 0x80) return first;
  Lead lead;
  if (!read_lead(first, lead)) return kReplacement;
  char32_t character = first & (0x3Fu >> lead.num_more);
  for (int i = 0; i < lead.num_more; ++i) {
    if (at == text.size()) return kReplacement;
    const unsigned char next = byte_at(text, at);
    if (next < lead.min || next > lead.max) return kReplacement;
    character = character << 6 | (next & 0x3Fu);
    lead.min = 0x80;
    lead.max = 0xBF;
    ++at;
  }
  return character;
}

std::size_t previous_character(std::string_view text, std::size_t end) {
  do {
    --end;
  } while (end > 0 && (byte_at(text, end) & 0xC0) == 0x80);
  return end;
}

void append_character(std::string& text, char32_t character) {
  const auto add = [&](char32_t byte) {
    text += static_cast<char>(static_cast<unsigned char>(byte));
  };
  if (character < 0x80) {
    add(character);
  } else if (character < 0x800) {
    add(0xC0 | character >> 6);
    add(0x80 | (character & 0x3F));
  } else if (character < 0x10000) {
    add(0xE0 | character >> 12);
    add(0x80 | (character >> 6 & 0x3F));
    add(0x80 | (character & 0x3F));
  } else {
    add(0xF0 | character >> 18);
    add(0x80 | (character >> 12 & 0x3F));
    add(0x80 | (character >> 6 & 0x3F));
    add(0x80 | (character & 0x3F));
  }
}

std::string to_utf8(char32_t character) {
  std::string text;
  append_character(text, character);
  return text;
}

bool is_ascii(std::string_view text) {
  std::size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, text.data() + at, 8);
    if ((bytes & 0x8080808080808080u) != 0) return false;
  }
  for (; at < text.size(); ++at) {
    if (byte_at(text, at) >= 0x80) return false;
  }
  return true;
}

std::string_view valid_utf8(std::string_view text, std::string& buffer) {
  if (is_ascii(text) || engine::is_utf8(text)) return text;
  buffer.clear();
  buffer.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) append_character(buffer, next_character(text, at));
  return buffer;
}

}  // namespace tessera::tools
