// What sequences are made of where a file keeps documents apart.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/data/token_file.h"

namespace tessera::tools {

/// A document, or a part of one: tokens [first, first + numel) of the file, of which targets are
/// the next.
struct Piece {
  std::int64_t first;
  std::int32_t numel, num_targets;  ///< num_targets: that are learned
};

/// What was made of the documents of a file.
struct DocumentCut {
  std::int64_t num_documents = 0;
  std::int64_t num_longer = 0;       ///< of these, than a sequence
  std::int64_t num_not_learned = 0;  ///< of these, without a token after the first to learn
  std::int64_t num_left_out = 0;     ///< parts of others of which nothing is learned
  std::int64_t longest = 0;          ///< tokens of a document
  std::int64_t most = 0;             ///< that nine documents of ten have at most
  // In sequences for training.
  std::int64_t num_pieces = 0;
  std::int64_t num_targets = 0;  ///< that are learned
  std::int64_t num_tokens = 0;   ///< that are read, without padding
};

/// The documents of `file`, in order, those of more than `seq` + 1 tokens in parts, without the
/// pieces of which nothing is learned. Sets what `cut` says of documents. Reads the file once.
/// Throws IoError when a token is not below `vocab`, or nothing is learned.
std::vector<Piece> cut_documents(const TokenFile& file, std::int64_t seq, std::int64_t vocab,
                                 DocumentCut& cut);

/// Puts pieces of at most `seq` tokens together into sequences by first_fit(): orders `pieces` by
/// their sequence, and as they were within one. Returns where each sequence begins in `pieces`, and
/// last where they end.
std::vector<std::int64_t> pack_pieces(std::vector<Piece>& pieces, std::int64_t seq);

}  // namespace tessera::tools
