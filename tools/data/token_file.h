// Files of token ids, which trainers read and //tools:tokenize writes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/file.h"

namespace tessera::tools {

/// How the bytes of a file are token ids.
enum class TokenFormat {
  kAuto,    ///< as name and header say
  kBytes,   ///< each byte is a token
  kUInt16,  ///< from the first byte on, as kUInt32: no header
  kUInt32,
};

/// Stands for a target that is not learned.
inline constexpr std::int32_t kMasked = -100;

// [Note: a file of documents]
// Ours, of which each document is learned by itself, and some of its tokens not at all. All
// numbers are little-endian:
//   256 x int32     20261128, 1, and zeros
//   int64, int64    how many tokens, and documents
//   int64 each      where a document ends: the number of tokens up to there
//   uint32 each     a token, and 2^31 more if it is not learned, such as those of a prompt
inline constexpr std::int32_t kDocumentsMagic = 20261128;
inline constexpr std::uint32_t kNotLearned = std::uint32_t{1} << 31;

/// Tokens in memory. Of documents, as [Note: a file of documents] has their tokens and ends; or
/// without ends, of one long text, all of which is learned.
struct DocumentTokens {
  std::vector<std::uint32_t> tokens{};
  std::vector<std::int64_t> ends{};
  std::string remark{};  ///< Document::remark of the text

  /// Adds a document of `tokens`, each with kNotLearned if it is not learned. Nothing without any.
  void add(std::span<const std::uint32_t> document);
};

/// A file of token ids. What TokenFormat::kAuto makes of it:
///   *.bin   llm.c v1: 256 x int32 header (20240520, 1, count), then uint16
///           llm.c v7: 256 x int32 header (20240801, 7, count), then uint32
///           documents: see [Note: a file of documents]
///           nanoGPT: uint16 from the first byte (any other .bin)
///   others  text: each byte is a token, vocabulary 256
/// Or the tokens that were made of a text or a .jsonl. Reads by copying (see InputFile) and is
/// thread-safe.
class TokenFile {
 public:
  /// Throws IoError naming the file and what to do: unreadable, empty, header and size at odds,
  /// half a token; with kAuto, a kind of file that holds no tokens (file_kind.h); documents with
  /// another format, which would have neither borders nor marks.
  explicit TokenFile(std::string path, TokenFormat format = TokenFormat::kAuto);
  /// What was made of the text or .jsonl at `path`. Throws IoError naming it when there are no
  /// tokens.
  TokenFile(std::string path, DocumentTokens documents);

  const std::string& path() const { return path_; }
  std::string_view format() const { return format_; }
  /// What is odd of the text that tokens were made of, for people; may be empty.
  const std::string& remark() const { return remark_; }
  bool is_bytes() const { return token_nbytes_ == 1; }
  /// Whether it says itself what its tokens are.
  bool has_header() const { return header_nbytes_ > 0 || !file_; }
  std::int64_t token_nbytes() const { return token_nbytes_; }
  /// The largest that a token of so many bits can be.
  std::int64_t max_possible_token() const {
    return (std::int64_t{1} << (keeps_documents() ? 31 : 8 * token_nbytes_)) - 1;
  }
  std::int64_t num_tokens() const { return num_tokens_; }
  bool keeps_documents() const { return !document_ends_.empty(); }
  /// Where each document ends, in order, the last at num_tokens(); none: the file does not say.
  const std::vector<std::int64_t>& document_ends() const { return document_ends_; }
  /// The bytes of the first tokens, without a header: up to `max_nbytes`.
  std::string head(std::size_t max_nbytes) const;
  /// Fills `out` with tokens [first, first + out.size()). Throws IoError for a token that is not
  /// below `vocab`, with its position.
  void read(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> out) const;
  /// As read(), with kMasked for tokens that are not learned.
  void read_targets(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> out) const;
  /// What read() and read_targets() give, read at once: as many of each.
  void read(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> tokens,
            std::span<std::int32_t> targets) const;
  /// Reads the whole file once and returns its largest token; of bytes, which all are below a
  /// vocabulary of 256, max_possible_token(). Throws IoError for the first token that is not
  /// below `vocab`.
  std::int64_t check_tokens(std::int64_t vocab) const;

 private:
  void read_header(TokenFormat without);
  void read_documents();
  template <class Use>
  void with_width(Use use) const;
  void read_some(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> tokens,
                 std::span<std::int32_t> targets) const;
  template <class T>
  void read_raw(std::int64_t first, std::span<T> out) const;

  std::string path_;
  std::optional<engine::InputFile> file_;  // none: in_memory_
  std::vector<std::uint32_t> in_memory_;
  std::string_view format_;
  std::string remark_;
  std::int64_t header_nbytes_ = 0;
  std::int64_t token_nbytes_ = 1;  // 1, 2 or 4
  std::int64_t num_tokens_ = 0;
  std::vector<std::int64_t> document_ends_;
};

}  // namespace tessera::tools
