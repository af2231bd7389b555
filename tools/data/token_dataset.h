// The batches that training draws from a token file.
//
//   TokenDataset data(TokenFile(path), {.seq = 256, .vocab = 50257});
//   data.batch(first_sample, 8, tokens, targets);    // (8, 256) each
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/data/token_file.h"

namespace tessera::tools {

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

/// Sequence i is tokens [i * seq, i * seq + seq); its targets are the same shifted by one. Of a
/// file of documents a sequence is one of them instead, or a part of a longer one, followed by
/// zeros whose targets are masked, as are those that are not learned; a part without any target is
/// left out. A sample is addressed by its global number, so that what training sees does not depend
/// on how samples are dealt to ranks and micro-batches.
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
  bool keeps_documents() const { return !pieces_.empty(); }
  /// What was made of the documents of a file.
  struct Cut {
    std::int64_t num_documents = 0;
    std::int64_t num_longer = 0;       ///< of these, than a sequence
    std::int64_t num_not_learned = 0;  ///< of these, without a token after the first to learn
    std::int64_t num_left_out = 0;     ///< parts of others of which nothing is learned
    std::int64_t longest = 0;          ///< tokens of a document
    std::int64_t most = 0;             ///< that nine documents of ten have at most
    // In sequences for training.
    std::int64_t num_targets = 0;  ///< that are learned
    std::int64_t num_tokens = 0;   ///< that are read, without padding
  };
  const Cut& cut() const { return cut_; }

  /// Samples [first_sample, first_sample + batch) of the endless training order into tokens and
  /// targets, (batch, seq) each. Thread-safe.
  void batch(std::int64_t first_sample, std::int64_t batch, std::span<std::int32_t> tokens,
             std::span<std::int32_t> targets) const;
  /// Validation sequences [first, first + batch), which must exist.
  void val_batch(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                 std::span<std::int32_t> targets) const;
  /// How many targets of batch(first_sample, batch, ..) are learned; reads no file.
  std::int64_t num_targets(std::int64_t first_sample, std::int64_t batch) const;
  std::int64_t num_val_targets(std::int64_t first, std::int64_t batch) const;

 private:
  // A document, or a part of one: tokens [first, first + numel), of which targets are the next.
  struct Piece {
    std::int64_t first;
    std::int32_t numel, num_targets;
  };
  void cut_documents();
  void count_targets();
  std::int64_t keep_learned();
  void read_sequence(std::int64_t i, std::span<std::int32_t> tokens,
                     std::span<std::int32_t> targets) const;
  std::int64_t num_targets_of_sequence(std::int64_t i) const;
  std::int64_t train_sequence(std::int64_t sample) const;
  template <class SequenceOf>
  void fill(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
            std::span<std::int32_t> targets, SequenceOf sequence_of) const;

  TokenFile file_;
  TokenDatasetOptions options_;
  std::int64_t num_train_ = 0;
  std::int64_t num_val_ = 0;
  std::int64_t max_token_ = 0;
  std::vector<Piece> pieces_;  // of a file of documents
  Cut cut_;
};

}  // namespace tessera::tools
