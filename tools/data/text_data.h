// Token files and the batches that training draws from them.
//
//   TokenDataset data(TokenFile(path), {.seq = 256, .vocab = 50257});
//   data.batch(first_sample, 8, tokens, targets);    // (8, 256) each
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "engine/io/file.h"

namespace tessera::tools {

/// How the bytes of a file are token ids.
enum class TokenFormat {
  kAuto,    ///< as name and header say
  kBytes,   ///< each byte is a token
  kUInt16,  ///< from the first byte on, as kUInt32: no header
  kUInt32,
};

/// A file of token ids. What TokenFormat::kAuto makes of it:
///   *.bin   llm.c v1: 256 x int32 header (20240520, 1, count), then uint16
///           llm.c v7: 256 x int32 header (20240801, 7, count), then uint32
///           nanoGPT: uint16 from the first byte (any other .bin)
///   others  text: each byte is a token, vocabulary 256
/// Reads by copying (see InputFile) and is thread-safe.
class TokenFile {
 public:
  /// Throws IoError naming the file and what to do: unreadable, empty, header and size at odds,
  /// half a token; with kAuto, a kind of file that holds no tokens (file_kind.h).
  explicit TokenFile(std::string path, TokenFormat format = TokenFormat::kAuto);

  const std::string& path() const { return file_.path(); }
  std::string_view format() const { return format_; }
  bool is_bytes() const { return token_nbytes_ == 1; }
  bool has_header() const { return header_nbytes_ > 0; }
  std::int64_t token_nbytes() const { return token_nbytes_; }
  /// That so many bytes can hold.
  std::int64_t max_possible_token() const { return (std::int64_t{1} << (8 * token_nbytes_)) - 1; }
  std::int64_t num_tokens() const { return num_tokens_; }
  /// The bytes of the first tokens, without a header: up to `max_nbytes`.
  std::string head(std::size_t max_nbytes) const;
  /// Fills `out` with tokens [first, first + out.size()). Throws IoError for a token that is not
  /// below `vocab`, with its position.
  void read(std::int64_t first, std::int64_t vocab, std::span<std::int32_t> out) const;
  /// Reads the whole file once and returns its largest token; of bytes, which all are below a
  /// vocabulary of 256, max_possible_token(). Throws IoError for the first token that is not
  /// below `vocab`.
  std::int64_t check_tokens(std::int64_t vocab) const;

 private:
  void read_header(TokenFormat without);
  template <class Use>
  void with_width(Use use) const;

  engine::InputFile file_;
  std::string_view format_;
  std::int64_t header_nbytes_ = 0;
  std::int64_t token_nbytes_ = 1;  // 1, 2 or 4
  std::int64_t num_tokens_ = 0;
};

enum class SampleOrder {
  kSequential,  ///< sample n is sequence n mod the number of sequences
  kShuffle,     ///< each epoch is a permutation of all sequences, a function of (seed, epoch)
};

struct TokenDatasetOptions {
  std::int64_t seq = 0;      ///< tokens of a sequence
  std::int64_t vocab = 256;  ///< every token must be below
  double val_fraction = 0;   ///< in [0, 1): part of the sequences, at the end, kept for validation
  SampleOrder order = SampleOrder::kSequential;
  std::uint64_t seed = 0;
};

/// Sequence i is tokens [i * seq, i * seq + seq); its targets are the same shifted by one. A sample
/// is addressed by its global number, so that what training sees does not depend on how samples
/// are dealt to ranks and micro-batches.
class TokenDataset {
 public:
  /// Reads the whole file once to check its tokens. Throws IoError when a token is out of the
  /// vocabulary or the file holds less than a sequence for training (and, if asked for, one for
  /// validation); InvalidArgument for options out of range.
  TokenDataset(TokenFile file, const TokenDatasetOptions& options);

  const TokenFile& file() const { return file_; }
  std::int64_t max_token() const { return max_token_; }  ///< see TokenFile::check_tokens()
  std::int64_t seq() const { return options_.seq; }
  std::int64_t num_sequences() const { return num_train_; }
  std::int64_t num_val_sequences() const { return num_val_; }

  /// Samples [first_sample, first_sample + batch) of the endless training order into tokens and
  /// targets, (batch, seq) each. Thread-safe.
  void batch(std::int64_t first_sample, std::int64_t batch, std::span<std::int32_t> tokens,
             std::span<std::int32_t> targets) const;
  /// Validation sequences [first, first + batch), which must exist.
  void val_batch(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                 std::span<std::int32_t> targets) const;

 private:
  std::int64_t train_sequence(std::int64_t sample) const;
  template <class SequenceOf>
  void fill(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
            std::span<std::int32_t> targets, SequenceOf sequence_of) const;

  TokenFile file_;
  TokenDatasetOptions options_;
  std::int64_t num_train_ = 0;
  std::int64_t num_val_ = 0;
  std::int64_t max_token_ = 0;
};

}  // namespace tessera::tools
