// What PowerSGD makes of one flat: which parameters are compressed as which matrices, where their
// elements lie in its buffers, and what is sent. Integers only.
//
//   input:     | rows of matrix 0, pad | rows of matrix 1, pad | ...   what this rank has of them
//   message 1: | P 0 | P 1 | ... | plain 0 | plain 1 | ...              all rows
//   message 2: | Q 0 | Q 1 | ...
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/tensor.h"
#include "shard/layout.h"

namespace tessera::shard {

struct LowRankOptions {
  std::int64_t rank = 1;
  /// Compressed is what becomes smaller by more than this factor:
  /// (rows + cols) * rank * min_compression_rate < rows * cols.
  double min_compression_rate = 2;
  /// One square matrix of all elements of the flat, in the order of its parameters, and zeros.
  bool batched = false;
};

/// A matrix M (rows, cols), approximated as P (rows, rank) Q^T (rank, cols).
struct LowRankMatrix {
  std::size_t parameter;  ///< of a batched one the first
  std::int64_t rows, cols, rank;
  std::int64_t row_begin, num_rows;  ///< those that this rank has elements of
  std::int64_t begin, numel;         ///< its elements, from the first of row_begin on
  std::int64_t input;                ///< where row_begin begins in the input
  std::int64_t p, q;                 ///< in message 1 and 2
};

/// Elements of one parameter that this rank has.
struct LowRankPiece {
  std::size_t parameter;
  std::int64_t parameter_begin;
  std::int64_t flat;  ///< first element in the flat
  std::int64_t numel;
  std::optional<std::size_t> matrix;  ///< none: sent as they are
  std::int64_t at;                    ///< in the input, or of what is sent as it is in message 1
};

class LowRankLayout {
 public:
  /// Parameters of `shapes`, laid out as `layout`; this rank has the elements of the flat that lie
  /// in `held`. A parameter is a matrix (first dimension, all others). Throws InvalidArgument for a
  /// rank below 1 or a compression rate below 0.
  LowRankLayout(std::span<const engine::Shape> shapes, const Layout& layout, const Range& held,
                const LowRankOptions& options);

  const std::vector<LowRankMatrix>& matrices() const { return matrices_; }
  /// In the order of the flat.
  const std::vector<LowRankPiece>& pieces() const { return pieces_; }
  std::int64_t input_numel() const { return input_numel_; }
  /// Of the P and of all that is sent in the first message, and of the Q.
  std::int64_t p_numel() const { return p_numel_; }
  std::int64_t message_numel() const { return message_numel_; }
  std::int64_t q_numel() const { return q_numel_; }
  /// The most rows times columns of a matrix that this rank has.
  std::int64_t max_numel() const { return max_numel_; }

  /// What stands for parameter `i` in the messages of one reduction. Of a batched matrix its share.
  struct Sent {
    std::int64_t rank;  ///< 0: sent as it is
    double numel;
  };
  Sent sent(std::size_t i) const { return sent_[i]; }

 private:
  void add_matrix(std::size_t parameter, std::int64_t rows, std::int64_t cols, std::int64_t rank,
                  const Range& held);

  std::vector<LowRankMatrix> matrices_;
  std::vector<LowRankPiece> pieces_;
  std::vector<Sent> sent_;
  std::int64_t input_numel_ = 0, p_numel_ = 0, message_numel_ = 0, q_numel_ = 0, max_numel_ = 0;
};

}  // namespace tessera::shard
