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

}  // namespace

PairAttention::PairAttention(const Memory& memory, const AttentionLayout& layout, bool is_backward)
    : s_(layout),
      depth_((layout.head_size + 1) / 2),
      width_(padded(layout.head_size, engine::kPairCols)),
      keys_(to_lanes(layout.tokens)) {
  static_assert(kRows % 2 == 0);   // an odd number of rows leaves room in pairs of them
  static_assert(kRows <= kLanes);  // see ScoreTile::visible()
  const std::int64_t rows = std::min(kRows, padded(s_.tokens, 2)), keys = std::min(kKeys, keys_);
  k_cols_ = scratch(memory, depth_, keys_);
  rows_of_keys_ = scratch(memory, keys_ / 2, width_);
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
  v_cols_ = scratch(memory, depth_, keys_);
  dy_cols_ = scratch(memory, rows, depth_);
  q_rows_ = scratch(memory, rows / 2, width_);
  dy_rows_ = scratch(memory, rows / 2, width_);
  dk_ = scratch(memory, s_.tokens, width_);
  dv_ = scratch(memory, s_.tokens, width_);
}

template <class Work>
void PairAttention::for_each_tile(std::int64_t row, std::int64_t rows, Work work) const {
  const std::int64_t end = s_.causal ? row + rows : s_.tokens;
  for (std::int64_t key = 0; key < end; key += kKeys) {
    work(ScoreTile{row, rows, key, std::min(kKeys, end - key)});
  }
}

// c (rows, ld) = q k^T, or dy v^T.
void PairAttention::multiply_cols(const ScoreTile& tile, const Tensor& a, const Tensor& b,
                                  const Tensor& c) const {
  PairProduct{.a = pairs_of(a),
              .b = pairs_of(b) + tile.key,
              .c = c.data<float>(),
              .lda = depth_,
              .ldb = keys_,
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

void PairAttention::forward(const BFloat16* qkv, BFloat16* y, float* lse) const {
  const std::int64_t d = s_.head_size, ld = s_.qkv_width();
  float* const scores = p_.data<float>();
  float* const largest = largest_.data<float>();
  float* const sum = sum_.data<float>();
  float* const out = out_.data<float>();
  const auto attend = [&](const ScoreTile& tile) {
    multiply_cols(tile, q_cols_, k_cols_, p_);
    update_pair_softmax(tile, s_, scores, pairs_of(p_cols_), largest, sum, out, width_);
    multiply_keys(tile, p_cols_);
  };
  engine::with_isa([&] {
    for (std::int64_t b = 0; b < s_.batch; ++b) {
      for (std::int64_t h = 0; h < s_.heads; ++h) {
        if (h % s_.group() == 0) {
          const std::int64_t g = h / s_.group();
          pair_cols_transposed(pairs_of(k_cols_), keys_, qkv + s_.k_at(b, g), s_.tokens, d, ld);
          pair_rows(pairs_of(rows_of_keys_), width_, qkv + s_.v_at(b, g), s_.tokens, d, ld);
        }
        for (std::int64_t row = 0; row < s_.tokens; row += kRows) {
          const std::int64_t rows = std::min(kRows, s_.tokens - row);
          pair_cols(pairs_of(q_cols_), depth_, qkv + s_.q_at(b, h) + row * ld, rows, d, ld);
          for_each_tile(row, rows, attend);
          BFloat16* const dst = y + s_.y_at(b, h) + row * s_.y_width();
          for (std::int64_t r = 0; r < rows; ++r) {
            store_row(dst + r * s_.y_width(), out + r * width_, d, 1 / sum[r], false);
            if (lse != nullptr)
              lse[s_.lse_at(b, h) + row + r] = softmax_lse(largest[r], sum[r], s_.scale);
          }
        }
      }
    }
  });
}

void PairAttention::backward(const BFloat16* qkv, const BFloat16* y, const float* lse,
                             const BFloat16* dy, BFloat16* dqkv, bool accumulate) const {
  const std::int64_t d = s_.head_size, ld = s_.qkv_width(), y_ld = s_.y_width();
  float* const dk = dk_.data<float>();
  float* const dv = dv_.data<float>();
  const PairScores scores{pairs_of(p_rows_), pairs_of(ds_rows_), pairs_of(ds_cols_)};
  engine::with_isa([&] {
    for (std::int64_t b = 0; b < s_.batch; ++b) {
      for (std::int64_t h = 0; h < s_.heads; ++h) {
        const std::int64_t g = h / s_.group();
        if (h % s_.group() == 0) {
          const BFloat16 *const k = qkv + s_.k_at(b, g), *const v = qkv + s_.v_at(b, g);
          pair_cols_transposed(pairs_of(k_cols_), keys_, k, s_.tokens, d, ld);
          pair_cols_transposed(pairs_of(v_cols_), keys_, v, s_.tokens, d, ld);
          pair_rows(pairs_of(rows_of_keys_), width_, k, s_.tokens, d, ld);
          engine::fill_zero(dk_);
          engine::fill_zero(dv_);
        }
        for (std::int64_t row = 0; row < s_.tokens; row += kRows) {
          const std::int64_t rows = std::min(kRows, s_.tokens - row);
          const std::int64_t q_at = s_.q_at(b, h) + row * ld, y_at = s_.y_at(b, h) + row * y_ld;
          pair_cols(pairs_of(q_cols_), depth_, qkv + q_at, rows, d, ld);
          pair_rows(pairs_of(q_rows_), width_, qkv + q_at, rows, d, ld);
          pair_cols(pairs_of(dy_cols_), depth_, dy + y_at, rows, d, y_ld);
          pair_rows(pairs_of(dy_rows_), width_, dy + y_at, rows, d, y_ld);
          row_deltas(s_, rows, dy + y_at, y + y_at, y_ld, delta_.data<float>());
          for_each_tile(row, rows, [&](const ScoreTile& tile) {
            multiply_cols(tile, q_cols_, k_cols_, p_);
            multiply_cols(tile, dy_cols_, v_cols_, ds_);
            pair_scores_backward(tile, s_, p_.data<float>(), ds_.data<float>(), scores,
                                 lse + s_.lse_at(b, h) + row, delta_.data<float>());
            multiply_rows(tile, p_rows_, dy_rows_, dv_);
            multiply_rows(tile, ds_rows_, q_rows_, dk_);
            multiply_keys(tile, ds_cols_);
          });
          store_rows(dqkv + q_at, ld, out_.data<float>(), width_, rows, d, s_.scale, accumulate);
        }
        if ((h + 1) % s_.group() == 0) {
          store_rows(dqkv + s_.k_at(b, g), ld, dk, width_, s_.tokens, d, s_.scale, accumulate);
          store_rows(dqkv + s_.v_at(b, g), ld, dv, width_, s_.tokens, d, 1, accumulate);
        }
      }
    }
  });
}

}  // namespace tessera::ops
