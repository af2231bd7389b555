// What attention on the CPU does between its products, with a tile of scores and with rows of a
// head. Private to attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>

#include "engine/dtype.h"
#include "ops/attention_layout.h"
#include "ops/lanes.h"
#include "ops/softmax_rows.h"
#include "ops/vector_math.h"

namespace tessera::ops {

/// Of samples, or of some tokens that lie in one, with pointers to the first of them.
struct PartLayout : AttentionLayout {
  std::int64_t sample_tokens;

  constexpr std::int64_t lse_at(std::int64_t b, std::int64_t h) const {
    return (b * heads + h) * sample_tokens;
  }
};

/// What backward on the CPU reads and writes: assigns every element of dqkv, or adds to it.
template <class T>
struct BackwardRows {
  const T *qkv, *y;
  const float* lse;
  const T* dy;
  T* dqkv;
  bool accumulate;
};

/// Scores of queries [row, row + rows) by keys [key, key + keys).
struct ScoreTile {
  std::int64_t row, rows, key, keys;

  /// From one row to the next: whole lanes.
  std::int64_t ld() const { return to_lanes(keys); }
  /// Keys that query row + r may see here; 0 or less if there are none, but more than -kLanes.
  std::int64_t visible(bool causal, std::int64_t r) const {
    return causal ? std::min(row + r + 1 - key, keys) : keys;
  }
};

/// -inf from `visible` on, to the end of its last lanes.
inline void mask(float* scores, std::int64_t visible) {
  const std::int64_t begin = visible / kLanes * kLanes;
  const auto in_last = static_cast<std::int32_t>(visible - begin);  // as wide as a score
  if (in_last <= 0) return;
  for (std::int32_t l = 0; l < std::int32_t{kLanes}; ++l) {
    float& score = scores[begin + l];
    score = select(l < in_last, score, -std::numeric_limits<float>::infinity());
  }
}

inline constexpr float kLog2E = std::numbers::log2e_v<float>, kLn2 = std::numbers::ln2_v<float>;

/// The online softmax: takes a tile of scores to probabilities `p` relative to the new maximum, 0
/// up to ld where a query sees nothing, and scales what was summed so far to match: `sum`, and rows
/// of `out`, `out_ld` apart. `largest` is each row's largest score. It is subtracted before scores
/// are scaled, so that its own probability is 1 whatever its size: a rounding of it would be part
/// of `sum`, which is f32, and not of a `p` that is rounded to bf16, and backward multiplies the
/// difference by keys as large as the score.
template <class P>
void update_softmax(const ScoreTile& tile, const AttentionLayout& s, float* scores, P* p,
                    float* largest, float* sum, float* out, std::int64_t out_ld) {
  const float unit = s.scale * kLog2E;
  const std::int64_t ld = tile.ld();
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    float* const x = scores + r * ld;
    const std::int64_t visible = tile.visible(s.causal, r);
    mask(x, visible);
    const float here = row_max(x, to_lanes(visible));
    if (tile.key == 0) {
      largest[r] = here;
      sum[r] = 0;
    } else if (here > largest[r]) {
      const float factor = exp2((largest[r] - here) * unit);
      largest[r] = here;
      sum[r] *= factor;
      for (std::int64_t i = 0; i < out_ld; ++i) out[r * out_ld + i] *= factor;
    }
  }
  // In a loop of their own exponentials do not wait for their row's maximum.
  for (std::int64_t r = 0; r < tile.rows; ++r, scores += ld, p += ld) {
    const std::int64_t keys = to_lanes(tile.visible(s.causal, r));
    sum[r] += lane_sum(keys, [=, x = scores, of_row = largest[r]](std::int64_t i) {
      const float probability = exp2((x[i] - of_row) * unit);
      if constexpr (std::is_same_v<P, float>) {
        x[i] = probability;  // which is p, so that the compiler sees one row
      } else {
        engine::store_f32(p[i], probability);
      }
      return probability;
    });
    std::fill(p + keys, p + ld, P{});
  }
}

/// log(sum exp(scale score)) of a row, in whose softmax nothing is missing.
inline float softmax_lse(float largest, float sum, float scale) {
  return std::fma(largest, scale, std::log(sum));
}

/// dst = factor src, or dst +=.
template <class T>
void store_row(T* dst, const float* src, std::int64_t numel, float factor, bool accumulate) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float x = src[i] * factor;
    engine::store_f32(dst[i], accumulate ? engine::to_f32(dst[i]) + x : x);
  }
}

/// store_row() of each of `rows` rows, `ld` and `src_ld` apart.
template <class T>
void store_rows(T* dst, std::int64_t ld, const float* src, std::int64_t src_ld, std::int64_t rows,
                std::int64_t width, float factor, bool accumulate) {
  for (std::int64_t r = 0; r < rows; ++r)
    store_row(dst + r * ld, src + r * src_ld, width, factor, accumulate);
}

/// A tile's probabilities, and the gradient of its scores but for the scale: where they are
/// computed in f32, and where products read them.
template <class P>
struct Scores {
  float *p, *ds;
  P *p_operand, *ds_operand;
};

/// delta[r] = rowsum(dy * y) of one head's rows, `ld` apart: all at once, so that their cache
/// misses overlap.
template <class T>
void row_deltas(const AttentionLayout& s, std::int64_t rows, const T* dy, const T* y,
                std::int64_t ld, float* delta) {
  for (std::int64_t r = 0; r < rows; ++r, dy += ld, y += ld) {
    delta[r] = lane_sum(
        s.head_size, [=](std::int64_t i) { return engine::to_f32(dy[i]) * engine::to_f32(y[i]); });
  }
}

/// Takes scores to probabilities, and dy v^T to the gradient of the scores; both are 0 up to ld
/// where a query sees nothing. `lse` and `delta` of the tile's rows.
template <class P>
void scores_backward(const ScoreTile& tile, const AttentionLayout& s, const Scores<P>& scores,
                     const float* lse, const float* deltas) {
  const float unit = s.scale * kLog2E;
  const std::int64_t ld = tile.ld();
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const float delta = deltas[r], shift = lse[r] * kLog2E;
    float* __restrict p = scores.p + r * ld;
    float* __restrict ds = scores.ds + r * ld;
    P* __restrict p_operand = scores.p_operand + r * ld;
    P* __restrict ds_operand = scores.ds_operand + r * ld;
    const std::int64_t visible = tile.visible(s.causal, r), keys = to_lanes(visible);
    mask(p, visible);
    for (std::int64_t c = 0; c < keys; ++c) {
      const float probability = exp2(std::fma(p[c], unit, -shift));
      const float slope = probability * (ds[c] - delta);
      if constexpr (std::is_same_v<P, float>) {
        p[c] = probability;
        ds[c] = slope;
      } else {
        engine::store_f32(p_operand[c], probability);
        engine::store_f32(ds_operand[c], slope);
      }
    }
    std::fill(p_operand + keys, p_operand + ld, P{});
    std::fill(ds_operand + keys, ds_operand + ld, P{});
  }
}

}  // namespace tessera::ops
