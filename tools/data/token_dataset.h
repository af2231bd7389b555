// The batches that training draws from a token file.
//
//   TokenDataset data(TokenFile(path), {.seq = 256, .vocab = 50257});
//   data.batch(first_sample, 8, tokens, targets);    // (8, 256) each
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/data/document_pieces.h"
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
  /// Sequences have room for several documents. In other files each is one document.
  bool packing = false;
};

/// Sequence i is tokens [i * seq, i * seq + seq); its targets are the same shifted by one. Of a
/// file of documents a sequence is one of them instead, or a part of a longer one, followed by
/// zeros whose targets are masked, as are those that are not learned; a part without any target is
/// left out. With packing a sequence is several of these pieces, as pack_pieces() places those for
/// training, and by themselves those for validation; then positions tell where each begins: they
/// count from 0 at each piece, and at the zeros. A sample is addressed by its global number,
/// so that what training sees does not depend on how samples are dealt to ranks and micro-batches.
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
  bool packs() const { return options_.packing; }
  const DocumentCut& cut() const { return cut_; }
  /// Of the documents and parts that tokens for training are in, one each token: attention has as
  /// many pairs for a token as in a document of this length. Without packing a row is computed
  /// whole: seq().
  std::int64_t mean_length() const;

  /// Samples [first_sample, first_sample + batch) of the endless training order into tokens and
  /// targets, (batch, seq) each; with packing into `positions`, too, which is empty without.
  /// Thread-safe.
  void batch(std::int64_t first_sample, std::int64_t batch, std::span<std::int32_t> tokens,
             std::span<std::int32_t> targets, std::span<std::int32_t> positions = {}) const;
  /// Validation sequences [first, first + batch), which must exist, in the same way.
  void val_batch(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                 std::span<std::int32_t> targets, std::span<std::int32_t> positions = {}) const;
  /// What a sample of the training order is made of, in order: documents or parts of one; of a file
  /// without documents one piece. Reads no file.
  std::vector<Piece> pieces(std::int64_t sample) const;
  /// Of a validation sequence, which must exist.
  std::vector<Piece> val_pieces(std::int64_t i) const;
  /// How many targets of batch(first_sample, batch, ..) are learned; reads no file.
  std::int64_t num_targets(std::int64_t first_sample, std::int64_t batch) const;
  std::int64_t num_val_targets(std::int64_t first, std::int64_t batch) const;

 private:
  void pack();
  std::span<const Piece> pieces_of(std::int64_t sequence) const;
  std::vector<Piece> all_pieces_of(std::int64_t sequence) const;
  void read_sequence(std::int64_t i, std::span<std::int32_t> tokens,
                     std::span<std::int32_t> targets, std::span<std::int32_t> positions) const;
  void read_piece(const Piece& piece, std::span<std::int32_t> tokens,
                  std::span<std::int32_t> targets) const;
  std::int64_t num_targets_of_sequence(std::int64_t i) const;
  std::int64_t train_sequence(std::int64_t sample) const;
  template <class SequenceOf>
  void fill(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
            std::span<std::int32_t> targets, std::span<std::int32_t> positions,
            SequenceOf sequence_of) const;

  TokenFile file_;
  TokenDatasetOptions options_;
  std::int64_t num_train_ = 0;
  std::int64_t num_val_ = 0;
  std::int64_t max_token_ = 0;
  std::vector<Piece> pieces_;         // of a file of documents
  std::vector<std::int64_t> begins_;  // of sequences in pieces_ and where the last ends; packing
  DocumentCut cut_;
};

}  // namespace tessera::tools
