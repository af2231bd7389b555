#include "ops/pair_scores.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TESSERA_BF16 gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace tessera::ops {

using engine::Pair;

#if defined(__x86_64__)
namespace {

constexpr int kFloats = 16;  // of a vector
static_assert(kLanes == 2 * kFloats);

constexpr __mmask16 kAll = 0xFFFF;

// 2^x within 3 ulp; 0 where the result is below 2^-126, and in lanes not in `lanes`. x = n + r and
// 0 <= r < 1: minimax polynomial for 2^r, n goes into the exponent. NaN gives NaN.
[[gnu::always_inline, TESSERA_BF16]] inline __m512 exp2(__m512 x, __mmask16 lanes = kAll) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0x1.ec320ap-10f);
  for (const float term :
       {0x1.26900cp-7f, 0x1.c95446p-5f, 0x1.ebd5a8p-3f, 0x1.62e4f6p-1f, 0x1.fffffep-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
  const __mmask16 is_normal = _mm512_mask_cmp_ps_mask(lanes, x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_normal, p, x);
}

// Nearest bf16 of 32; those below 2^-126 are 0.
[[gnu::always_inline, TESSERA_BF16]] inline __m512i rounded(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// What a row sees of its last kLanes keys.
struct LastLanes {
  __mmask16 low, high;
};
constexpr LastLanes kAllLanes{kAll, kAll};

// The keys of a row, in whole lanes.
struct RowKeys {
  std::int64_t count;
  LastLanes last;
};

// Of a row that sees `visible` keys and ends with lanes up to `keys`.
inline LastLanes last_lanes(std::int64_t visible, std::int64_t keys) {
  const std::uint64_t seen = (std::uint64_t{1} << (visible - (keys - kLanes))) - 1;
  return {static_cast<__mmask16>(seen), static_cast<__mmask16>(seen >> 16)};
}

inline RowKeys keys_of(const ScoreTile& tile, bool causal, std::int64_t row) {
  const std::int64_t visible = tile.visible(causal, row), count = to_lanes(visible);
  return {count, last_lanes(visible, count)};
}

// Zeros from `begin` to `end`, whole kFloats apart: a library's fill takes longer to start.
[[gnu::always_inline, TESSERA_BF16]] inline void clear(Pair* p, std::int64_t begin,
                                                       std::int64_t end) {
  for (std::int64_t c = begin; c < end; c += kFloats)
    _mm512_storeu_si512(p + c, _mm512_setzero_si512());
}

struct Larger {
  [[gnu::always_inline, TESSERA_BF16]] static __m512 of(__m512 a, __m512 b) {
    return among(kAll, a, b);  // without lanes GCC 12 warns of its own header
  }
  // a elsewhere.
  [[gnu::always_inline, TESSERA_BF16]] static __m512 among(__mmask16 lanes, __m512 a, __m512 b) {
    return _mm512_mask_max_ps(a, lanes, a, b);
  }
};
struct Sum {
  [[gnu::always_inline, TESSERA_BF16]] static __m512 of(__m512 a, __m512 b) { return a + b; }
};

// Leaves kBit vectors, of lanes that differ from one another in this bit.
template <class Op, int kBit, int... kLane>
[[gnu::always_inline, TESSERA_BF16]] inline void fold(__m512 (&rows)[kFloats],
                                                      std::integer_sequence<int, kLane...>) {
  for (int i = 0; i < kBit; ++i) {
    const __m512 x = rows[i], y = rows[i + kBit];
    rows[i] =
        Op::of(__builtin_shufflevector(x, y, ((kLane & kBit) != 0 ? kLane - kBit + 16 : kLane)...),
               __builtin_shufflevector(x, y, ((kLane & kBit) != 0 ? kLane + 16 : kLane + kBit)...));
  }
}

// The lanes of each row as one, by a tree: those of row r in lane r. Overwrites the rows.
template <class Op>
[[gnu::always_inline, TESSERA_BF16]] inline __m512 folded(__m512 (&rows)[kFloats]) {
  constexpr std::make_integer_sequence<int, kFloats> kOrder;
  fold<Op, 8>(rows, kOrder);
  fold<Op, 4>(rows, kOrder);
  fold<Op, 2>(rows, kOrder);
  fold<Op, 1>(rows, kOrder);
  return rows[0];
}

// By lane, the largest of a row's scores.
[[gnu::always_inline, TESSERA_BF16]] inline __m512 largest_of(const float* x, const RowKeys& keys) {
  __m512 low = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), high = low;
  if (keys.count == 0) return low;
  const std::int64_t end = keys.count - kLanes;
  for (std::int64_t c = 0; c < end; c += kLanes) {
    low = Larger::of(low, _mm512_loadu_ps(x + c));
    high = Larger::of(high, _mm512_loadu_ps(x + c + kFloats));
  }
  low = Larger::among(keys.last.low, low, _mm512_loadu_ps(x + end));
  high = Larger::among(keys.last.high, high, _mm512_loadu_ps(x + end + kFloats));
  return Larger::of(low, high);
}

// Probabilities of kLanes scores, and by lane their sums.
[[gnu::always_inline, TESSERA_BF16]] inline void exp_to_pairs(const float* scores, Pair* p,
                                                              LastLanes lanes, __m512 units,
                                                              __m512 largest, __m512& low_sum,
                                                              __m512& high_sum) {
  const __m512 low = exp2((_mm512_loadu_ps(scores) - largest) * units, lanes.low);
  const __m512 high = exp2((_mm512_loadu_ps(scores + kFloats) - largest) * units, lanes.high);
  low_sum = _mm512_add_ps(low_sum, low);
  high_sum = _mm512_add_ps(high_sum, high);
  _mm512_storeu_si512(p, rounded(low, high));
}

// The probabilities of a row, as pairs; returns their sum by lane.
[[gnu::always_inline, TESSERA_BF16]] inline __m512 row_to_pairs(const float* scores, Pair* p,
                                                                const RowKeys& keys, __m512 units,
                                                                __m512 largest) {
  __m512 low = _mm512_setzero_ps(), high = low;
  if (keys.count == 0) return low;
  const std::int64_t end = keys.count - kLanes;
  for (std::int64_t c = 0; c < end; c += kLanes)
    exp_to_pairs(scores + c, p + c / 2, kAllLanes, units, largest, low, high);
  exp_to_pairs(scores + end, p + end / 2, keys.last, units, largest, low, high);
  return _mm512_add_ps(low, high);
}

// Rows [row, row + count) of a tile, at most 16, whose maxima and sums are folded together.
[[TESSERA_BF16]] void update_rows(const ScoreTile& tile, const AttentionLayout& s, std::int64_t row,
                                  std::int64_t count, float* scores, Pair* p,
                                  float* largest_of_rows, float* sum, float* out,
                                  std::int64_t out_ld) {
  const auto lanes = static_cast<__mmask16>((1u << count) - 1);
  const __m512 units = _mm512_set1_ps(s.scale * kLog2E);
  const std::int64_t ld = tile.ld();
  __m512 of_rows[kFloats];
  for (__m512& of_row : of_rows) of_row = _mm512_setzero_ps();
  RowKeys keys[kFloats];
  for (std::int64_t r = 0; r < count; ++r) {
    keys[r] = keys_of(tile, s.causal, row + r);
    of_rows[r] = largest_of(scores + (row + r) * ld, keys[r]);
  }
  __m512 largest = folded<Larger>(of_rows), sums = _mm512_setzero_ps();
  if (tile.key > 0) {
    const __m512 before = _mm512_maskz_loadu_ps(lanes, largest_of_rows + row);
    const __mmask16 is_larger = _mm512_mask_cmp_ps_mask(lanes, largest, before, _CMP_GT_OQ);
    largest = _mm512_mask_mov_ps(before, is_larger, largest);
    const __m512 factor = exp2((before - largest) * units);
    sums = _mm512_maskz_loadu_ps(lanes, sum + row);
    sums = _mm512_mask_mul_ps(sums, is_larger, sums, factor);
    float factors[kFloats];
    _mm512_storeu_ps(factors, factor);
    for (std::int64_t r = 0; r < count; ++r) {
      if ((is_larger >> r & 1) == 0) continue;
      float* const of_row = out + (row + r) * out_ld;
      for (std::int64_t i = 0; i < out_ld; ++i) of_row[i] *= factors[r];
    }
  }
  _mm512_mask_storeu_ps(largest_of_rows + row, lanes, largest);
  float subtracted[kFloats];  // a load of what a masked store wrote waits for it
  _mm512_storeu_ps(subtracted, largest);
  for (std::int64_t r = 0; r < count; ++r) {
    Pair* const p_of_row = p + (row + r) * ld / 2;
    of_rows[r] = row_to_pairs(scores + (row + r) * ld, p_of_row, keys[r], units,
                              _mm512_set1_ps(subtracted[r]));
    clear(p_of_row, keys[r].count / 2, ld / 2);
  }
  _mm512_mask_storeu_ps(sum + row, lanes, sums + folded<Sum>(of_rows));
}

}  // namespace

void update_pair_softmax(const ScoreTile& tile, const AttentionLayout& s, float* scores, Pair* p,
                         float* largest, float* sum, float* out, std::int64_t out_ld) {
  for (std::int64_t row = 0; row < tile.rows; row += kFloats)
    update_rows(tile, s, row, std::min<std::int64_t>(tile.rows - row, kFloats), scores, p, largest,
                sum, out, out_ld);
}

namespace {

// Rows [row, row + kRows) of a tile, which are beside each other in pairs.
template <int kRows>
[[gnu::always_inline, TESSERA_BF16]] inline void pair_rows_backward(
    const ScoreTile& tile, const AttentionLayout& s, std::int64_t row, float* scores,
    const float* dp, const PairScores& to, const float* lse, const float* deltas,
    __m512i interleave) {
  const __m512 units = _mm512_set1_ps(s.scale * kLog2E);
  const std::int64_t ld = tile.ld();
  const std::int64_t keys = to_lanes(tile.visible(s.causal, row + kRows - 1));
  scores += row * ld, dp += row * ld;
  Pair *const p_rows = to.p_rows + row / 2 * ld, *const ds_rows = to.ds_rows + row / 2 * ld,
              *const ds_cols = to.ds_cols + row * ld / 2;
  __m512 shifts[kRows], delta[kRows];
  LastLanes last[kRows];
  for (int r = 0; r < kRows; ++r) {
    last[r] = last_lanes(tile.visible(s.causal, row + r), keys);
    shifts[r] = _mm512_set1_ps(lse[row + r] * kLog2E);
    delta[r] = _mm512_set1_ps(deltas[row + r]);
  }
  for (std::int64_t c = 0; c < keys; c += kLanes) {
    __m512 p[2][2], ds[2][2];  // by row and half
    for (int half = 0; half < 2; ++half) p[1][half] = ds[1][half] = _mm512_setzero_ps();
    for (int r = 0; r < kRows; ++r) {
      const LastLanes lanes = c + kLanes < keys ? kAllLanes : last[r];
      for (int half = 0; half < 2; ++half) {
        const std::int64_t at = r * ld + c + half * kFloats;
        p[r][half] = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + at), units, shifts[r]),
                          half == 0 ? lanes.low : lanes.high);
        ds[r][half] = _mm512_mul_ps(p[r][half], _mm512_sub_ps(_mm512_loadu_ps(dp + at), delta[r]));
      }
      _mm512_storeu_si512(ds_cols + (r * ld + c) / 2, rounded(ds[r][0], ds[r][1]));
    }
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = c + half * kFloats;
      _mm512_storeu_si512(p_rows + at,
                          _mm512_permutexvar_epi16(interleave, rounded(p[0][half], p[1][half])));
      _mm512_storeu_si512(ds_rows + at,
                          _mm512_permutexvar_epi16(interleave, rounded(ds[0][half], ds[1][half])));
    }
  }
  clear(p_rows, keys, ld);
  clear(ds_rows, keys, ld);
  for (int r = 0; r < kRows; ++r) clear(ds_cols, (r * ld + keys) / 2, (r + 1) * ld / 2);
}

}  // namespace

[[TESSERA_BF16]] void pair_scores_backward(const ScoreTile& tile, const AttentionLayout& s,
                                           float* scores, const float* dp, const PairScores& to,
                                           const float* lse, const float* deltas) {
  // Word l of the rounded 32 is an element of one row, word 16 + l one of the next.
  std::array<std::uint16_t, 32> order;
  for (std::uint16_t l = 0; l < kFloats; ++l) order[2 * l] = l, order[2 * l + 1] = l + kFloats;
  const __m512i interleave = _mm512_loadu_si512(order.data());
  std::int64_t row = 0;
  for (; row + 2 <= tile.rows; row += 2)
    pair_rows_backward<2>(tile, s, row, scores, dp, to, lse, deltas, interleave);
  if (row < tile.rows) pair_rows_backward<1>(tile, s, row, scores, dp, to, lse, deltas, interleave);
}

#else

// Nobody is told that it can be used: engine::multiplies_pairs().
void update_pair_softmax(const ScoreTile&, const AttentionLayout&, float*, Pair*, float*, float*,
                         float*, std::int64_t) {}
void pair_scores_backward(const ScoreTile&, const AttentionLayout&, float*, const float*,
                          const PairScores&, const float*, const float*) {}

#endif

}  // namespace tessera::ops
