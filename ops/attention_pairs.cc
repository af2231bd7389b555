#include "ops/attention_pairs.h"

#include <algorithm>

#include "engine/elementwise.h"
#include "engine/gemm/pairs.h"
#include "engine/isa.h"
#include "ops/attention_scores.h"
#include "ops/pair_scores.h"

namespace tessera::ops {

using engine::BFloat16;
using engine::Category;
using engine::DType;
using engine::Memory;
using engine::Pair;
using engine::PairProduct;
using engine::Tensor;

namespace {

// Queries and keys of a tile: f32 scores of it stay in the second-level cache. Fewer queries waste
// less beyond the diagonal, more make fewer passes over dk and dv.
constexpr std::int64_t kRows = 24, kKeys = 256;

std::int64_t padded(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

Tensor scratch(const Memory& memory, std::int64_t rows, std::int64_t cols) {
  return Tensor::empty(memory, {rows, cols}, DType::kF32, "attention.scratch",
                       Category::kWorkspace);
}

// A pair takes the place of an f32.
Pair* pairs_of(const Tensor& x) { return reinterpret_cast<Pair*>(x.raw()); }

// Queries [row, row + rows) by the keys that they see.
template <class Work>
void for_each_tile(const AttentionLayout& s, std::int64_t row, std::int64_t rows, Work work) {
  const std::int64_t end = s.causal ? row + rows : s.tokens;
  for (std::int64_t key = 0; key < end; key += kKeys) {
    work(ScoreTile{row, rows, key, std::min(kKeys, end - key)});
  }
}

}  // namespace

PairAttention::PairAttention(const Memory& memory, const AttentionLayout& s, bool is_backward)
    : depth_((s.head_size + 1) / 2), width_(padded(s.head_size, engine::kPairCols)) {
  static_assert(kRows % 2 == 0);   // an odd number of rows leaves room in pairs of them
  static_assert(kRows <= kLanes);  // see ScoreTile::visible()
  const std::int64_t all_keys = to_lanes(s.tokens);
  const std::int64_t rows = std::min(kRows, padded(s.tokens, 2)), keys = std::min(kKeys, all_keys);
  k_cols_ = scratch(memory, depth_, all_keys);
  rows_of_keys_ = scratch(memory, all_keys / 2, width_);
  q_cols_ = scratch(memory, rows, depth_);
  out_ = scratch(memory, rows, width_);
  p_ = scratch(memory, rows, keys);
  if (!is_backward) {
    p_cols_ = scratch(memory, rows, keys / 2);
    largest_ = scratch(memory, 1, rows);
    sum_ = scratch(memory, 1, rows);
    return;
  }
  delta_ = scratch(memory, 1, rows);
  ds_ = scratch(memory, rows, keys);
  p_rows_ = scratch(memory, rows / 2, keys);
  ds_cols_ = scratch(memory, rows, keys / 2);
  ds_rows_ = scratch(memory, rows / 2, keys);
  v_cols_ = scratch(memory, depth_, all_keys);
  dy_cols_ = scratch(memory, rows, depth_);
  q_rows_ = scratch(memory, rows / 2, width_);
  dy_rows_ = scratch(memory, rows / 2, width_);
  dk_ = scratch(memory, s.tokens, width_);
  dv_ = scratch(memory, s.tokens, width_);
}

// c (rows, ld) = q k^T, or dy v^T.
void PairAttention::multiply_cols(const ScoreTile& tile, const Tensor& a, const Tensor& b,
                                  std::int64_t ldb, const Tensor& c) const {
  PairProduct{.a = pairs_of(a),
              .b = pairs_of(b) + tile.key,
              .c = c.data<float>(),
              .lda = depth_,
              .ldb = ldb,
              .ldc = tile.ld(),
              .m = tile.rows,
              .n = padded(tile.keys, engine::kPairCols),
              .num_pairs = depth_,
              .a_transposed = false,
              .accumulate = false}
      .run();
}

// out_ (rows, width) (+)= p v, or ds k.
void PairAttention::multiply_keys(const ScoreTile& tile, const Tensor& a) const {
  PairProduct{.a = pairs_of(a),
              .b = pairs_of(rows_of_keys_) + tile.key / 2 * width_,
              .c = out_.data<float>(),
              .lda = tile.ld() / 2,
              .ldb = width_,
              .ldc = width_,
              .m = tile.rows,
              .n = width_,
              .num_pairs = (tile.keys + 1) / 2,
              .a_transposed = false,
              .accumulate = tile.key > 0}
      .run();
}

// c (keys, width) += p^T dy, or ds^T q.
void PairAttention::multiply_rows(const ScoreTile& tile, const Tensor& a, const Tensor& b,
                                  const Tensor& c) const {
  PairProduct{.a = pairs_of(a),
              .b = pairs_of(b),
              .c = c.data<float>() + tile.key * width_,
              .lda = tile.ld(),
              .ldb = width_,
              .ldc = width_,
              .m = tile.keys,
              .n = width_,
              .num_pairs = (tile.rows + 1) / 2,
              .a_transposed = true,
              .accumulate = true}
      .run();
}

void PairAttention::forward(const PartLayout& s, const BFloat16* qkv, BFloat16* y,
                            float* lse) const {
  const std::int64_t d = s.head_size, ld = s.qkv_width(), keys = to_lanes(s.tokens);
  float* const scores = p_.data<float>();
  float* const largest = largest_.data<float>();
  float* const sum = sum_.data<float>();
  float* const out = out_.data<float>();
  const auto attend = [&](const ScoreTile& tile) {
    multiply_cols(tile, q_cols_, k_cols_, keys, p_);
    update_pair_softmax(tile, s, scores, pairs_of(p_cols_), largest, sum, out, width_);
    multiply_keys(tile, p_cols_);
  };
  engine::with_isa([&] {
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        if (h % s.group() == 0) {
          const std::int64_t g = h / s.group();
          pair_cols_transposed(pairs_of(k_cols_), keys, qkv + s.k_at(b, g), s.tokens, d, ld);
          pair_rows(pairs_of(rows_of_keys_), width_, qkv + s.v_at(b, g), s.tokens, d, ld);
        }
        for (std::int64_t row = 0; row < s.tokens; row += kRows) {
          const std::int64_t rows = std::min(kRows, s.tokens - row);
          pair_cols(pairs_of(q_cols_), depth_, qkv + s.q_at(b, h) + row * ld, rows, d, ld);
          for_each_tile(s, row, rows, attend);
          BFloat16* const dst = y + s.y_at(b, h) + row * s.y_width();
          for (std::int64_t r = 0; r < rows; ++r) {
            store_row(dst + r * s.y_width(), out + r * width_, d, 1 / sum[r], false);
            if (lse != nullptr)
              lse[s.lse_at(b, h) + row + r] = softmax_lse(largest[r], sum[r], s.scale);
          }
        }
      }
    }
  });
}

void PairAttention::backward(const PartLayout& s, const BackwardRows<BFloat16>& x) const {
  const BFloat16 *const qkv = x.qkv, *const y = x.y, *const dy = x.dy;
  const float* const lse = x.lse;
  BFloat16* const dqkv = x.dqkv;
  const bool accumulate = x.accumulate;
  const std::int64_t d = s.head_size, ld = s.qkv_width(), y_ld = s.y_width();
  const std::int64_t keys = to_lanes(s.tokens);
  float* const dk = dk_.data<float>();
  float* const dv = dv_.data<float>();
  const PairScores scores{pairs_of(p_rows_), pairs_of(ds_rows_), pairs_of(ds_cols_)};
  engine::with_isa([&] {
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t g = h / s.group();
        if (h % s.group() == 0) {
          const BFloat16 *const k = qkv + s.k_at(b, g), *const v = qkv + s.v_at(b, g);
          pair_cols_transposed(pairs_of(k_cols_), keys, k, s.tokens, d, ld);
          pair_cols_transposed(pairs_of(v_cols_), keys, v, s.tokens, d, ld);
          pair_rows(pairs_of(rows_of_keys_), width_, k, s.tokens, d, ld);
          std::fill_n(dk, s.tokens * width_, 0.0f);
          std::fill_n(dv, s.tokens * width_, 0.0f);
        }
        for (std::int64_t row = 0; row < s.tokens; row += kRows) {
          const std::int64_t rows = std::min(kRows, s.tokens - row);
          const std::int64_t q_at = s.q_at(b, h) + row * ld, y_at = s.y_at(b, h) + row * y_ld;
          pair_cols(pairs_of(q_cols_), depth_, qkv + q_at, rows, d, ld);
          pair_rows(pairs_of(q_rows_), width_, qkv + q_at, rows, d, ld);
          pair_cols(pairs_of(dy_cols_), depth_, dy + y_at, rows, d, y_ld);
          pair_rows(pairs_of(dy_rows_), width_, dy + y_at, rows, d, y_ld);
          row_deltas(s, rows, dy + y_at, y + y_at, y_ld, delta_.data<float>());
          for_each_tile(s, row, rows, [&](const ScoreTile& tile) {
            multiply_cols(tile, q_cols_, k_cols_, keys, p_);
            multiply_cols(tile, dy_cols_, v_cols_, keys, ds_);
            pair_scores_backward(tile, s, p_.data<float>(), ds_.data<float>(), scores,
                                 lse + s.lse_at(b, h) + row, delta_.data<float>());
            multiply_rows(tile, p_rows_, dy_rows_, dv_);
            multiply_rows(tile, ds_rows_, q_rows_, dk_);
            multiply_keys(tile, ds_cols_);
          });
          store_rows(dqkv + q_at, ld, out_.data<float>(), width_, rows, d, s.scale, accumulate);
        }
        if ((h + 1) % s.group() == 0) {
          store_rows(dqkv + s.k_at(b, g), ld, dk, width_, s.tokens, d, s.scale, accumulate);
          store_rows(dqkv + s.v_at(b, g), ld, dv, width_, s.tokens, d, 1, accumulate);
        }
      }
    }
  });
}

}  // namespace tessera::ops
