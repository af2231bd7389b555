// Byte pair encoding: a word becomes its characters, and pairs of tokens become one, those first
// that stand first among the merges, and of the same the leftmost.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tools/tokenizer/merge_table.h"
#include "tools/tokenizer/text/byte_alphabet.h"
#include "tools/tokenizer/word_cache.h"

namespace tessera::tools {

/// Tokens by their text, found by parts of other texts.
struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};
using TokenIds = std::unordered_map<std::string, std::int32_t, TextHash, std::equal_to<>>;

struct BpeOptions {
  /// Words are bytes, which the vocabulary has in the characters of ByteAlphabet.
  bool is_byte_level = false;
  bool ignore_merges = false;  ///< a word that is a token is this token, whatever the merges say
  bool byte_fallback = false;  ///< a character without a token is its bytes, as <0x0A>
  std::optional<std::int32_t> unknown{};  ///< the token of a character that has none otherwise
  bool fuse_unknown = false;              ///< of several in a row
};

/// What a thread needs to encode words, one at a time, with the same encoding always.
struct BpeScratch {
  WordCache cache;
  std::vector<std::int32_t> ids;
  std::vector<std::uint32_t> ranks;
  std::vector<std::uint64_t> heap;
  std::vector<std::uint32_t> next, previous;
};

/// Can be used by any number of threads, each with a scratch of its own.
class Bpe {
 public:
  Bpe(TokenIds vocab, std::span<const Merge> merges, const BpeOptions& options);

  /// Appends the tokens of `word`, of fewer than 2^31 bytes. A character that has no token, where
  /// there are neither bytes nor an unknown token for it, is left out, as the tokenizers of Hugging
  /// Face do. In n log(n).
  void encode(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const;

 private:
  // What a character becomes before any merge.
  struct Start {
    std::int32_t id = -1;               // where it is a token
    std::vector<std::int32_t> bytes{};  // otherwise, where all of its bytes are
  };

  Start start_of(const std::string& character) const;
  void encode_new(std::string_view word, BpeScratch& scratch) const;
  void start(std::string_view word, std::vector<std::int32_t>& ids) const;
  void merge_few(BpeScratch& scratch) const;
  void merge_many(BpeScratch& scratch) const;

  TokenIds vocab_;                    // with is_byte_level of bytes, and of what is nothing else
  std::array<Start, 256> of_byte_{};  // by byte; otherwise of the characters below 128
  std::array<std::int32_t, 256> byte_tokens_{};  // <0x0A>; -1: none
  MergeTable merges_;
  BpeOptions options_;
};

}  // namespace tessera::tools
