// Attention of bf16 on a CPU whose products of pairs are the fastest ([Note: pairs] in
// engine/gemm/pairs.h). Private to attention.
//
// [Note: attention in pairs]
// The arithmetic is that of [Note: attention tiles] in attention.cc. Keys and values of a head are
// laid out in pairs once, for all its queries, and queries once a tile; probabilities and the
// gradients of scores are computed in f32 and rounded to pairs, in which all products read them, so
// no product copies an operand:
//   scores   = q k^T    pairs along D      y, dq  = p v, ds k      pairs along keys
//   dy v^T              pairs along D      dv, dk = p^T dy, ds^T q  pairs along queries
// Rows, keys and D are padded with zeros to whole pairs and vectors: masked probabilities are 0 as
// well, so padding adds nothing, and no column of it is read.
#pragma once

#include <cstdint>

#include "engine/dtype.h"
#include "engine/memory.h"
#include "engine/tensor.h"
#include "ops/attention_cuda.h"

namespace tessera::ops {

struct PartLayout;
struct ScoreTile;
template <class T>
struct BackwardRows;

/// The kernels with their scratch, which is taken when one is made.
class PairAttention {
 public:
  /// Only where engine::multiplies_pairs().
  PairAttention(const engine::Memory& memory, const AttentionLayout& layout, bool is_backward);

  /// y and, unless null, lse of qkv, as attention() defines them.
  void forward(const PartLayout& s, const engine::BFloat16* qkv, engine::BFloat16* y,
               float* lse) const;
  void backward(const PartLayout& s, const BackwardRows<engine::BFloat16>& x) const;

 private:
  void multiply_cols(const ScoreTile& tile, const engine::Tensor& a, const engine::Tensor& b,
                     std::int64_t ldb, const engine::Tensor& c) const;
  void multiply_keys(const ScoreTile& tile, const engine::Tensor& a) const;
  void multiply_rows(const ScoreTile& tile, const engine::Tensor& a, const engine::Tensor& b,
                     const engine::Tensor& c) const;

  std::int64_t depth_;  // pairs of a head's elements
  std::int64_t width_;  // a head's elements, padded to vectors
  // Of one kv head, whose keys are padded to lanes: pairs (depth, keys) of k and v, and (keys / 2,
  // width) of v or, backward, of k.
  engine::Tensor k_cols_, v_cols_, rows_of_keys_;
  // Of a tile's queries: pairs (rows, depth) of q and dy, and (rows / 2, width) of the same.
  engine::Tensor q_cols_, dy_cols_, q_rows_, dy_rows_;
  // (rows, keys) f32, and as pairs of columns, (rows, keys / 2), or of rows, (rows / 2, keys).
  engine::Tensor p_, ds_, p_cols_, p_rows_, ds_cols_, ds_rows_;
  engine::Tensor out_;            // (rows, width) f32: y or dq
  engine::Tensor largest_, sum_;  // (rows) f32, of the keys so far
  engine::Tensor delta_;          // (rows) f32
  engine::Tensor dk_, dv_;        // (tokens, width) f32 of one kv head
};

}  // namespace tessera::ops
