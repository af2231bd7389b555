#include "engine/gemm/pairs.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TESSERA_BF16 gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")
#endif

#include <algorithm>
#include <cstring>

#include "engine/gemm/transpose.h"
#include "engine/isa.h"

namespace tessera::engine {

#if defined(__x86_64__)
namespace {

// Rows [row, row + kRows) and columns [col, col + 16 kVectors) of C, in registers.
template <int kRows, int kVectors, bool kTransposed>
[[gnu::always_inline, TESSERA_BF16]] inline void multiply_block(const PairProduct& p,
                                                                std::int64_t row,
                                                                std::int64_t col) {
  const Pair* const a = p.a + (kTransposed ? row : row * p.lda);
  const Pair* b = p.b + col;
  float* const c = p.c + row * p.ldc + col;
  __m512 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      sums[r][v] = p.accumulate ? _mm512_loadu_ps(c + r * p.ldc + v * kPairCols)  //
                                : _mm512_setzero_ps();
  for (std::int64_t i = 0; i < p.num_pairs; ++i, b += p.ldb) {
    __m512i x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = _mm512_loadu_si512(b + v * kPairCols);
    for (int r = 0; r < kRows; ++r) {
      const Pair pair = kTransposed ? a[i * p.lda + r] : a[r * p.lda + i];
      const __m512i y = _mm512_set1_epi32(static_cast<int>(pair));
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], reinterpret_cast<__m512bh>(y),
                                      reinterpret_cast<__m512bh>(x[v]));
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + r * p.ldc + v * kPairCols, sums[r][v]);
}

// All rows of columns [col, col + 16 kVectors).
template <int kVectors, bool kTransposed>
[[gnu::always_inline, TESSERA_BF16]] inline void multiply_columns(const PairProduct& p,
                                                                  std::int64_t col) {
  std::int64_t row = 0;
  for (; row + 6 <= p.m; row += 6) multiply_block<6, kVectors, kTransposed>(p, row, col);
  for (; row + 2 <= p.m; row += 2) multiply_block<2, kVectors, kTransposed>(p, row, col);
  if (row < p.m) multiply_block<1, kVectors, kTransposed>(p, row, col);
}

template <bool kTransposed>
[[TESSERA_BF16]] void multiply(const PairProduct& p) {
  std::int64_t col = 0;
  for (; col + 64 <= p.n; col += 64) multiply_columns<4, kTransposed>(p, col);
  for (; col + 32 <= p.n; col += 32) multiply_columns<2, kTransposed>(p, col);
  for (; col < p.n; col += kPairCols) multiply_columns<1, kTransposed>(p, col);
}

}  // namespace

void PairProduct::run() const { a_transposed ? multiply<true>(*this) : multiply<false>(*this); }

#else

// Nobody is told that it can be used: multiplies_pairs().
void PairProduct::run() const {}

#endif

namespace {

constexpr std::int64_t kSide = kTransposeSide;
using Words [[gnu::vector_size(64)]] = std::uint32_t;

}  // namespace

void pair_rows(Pair* dst, std::int64_t dst_ld, const BFloat16* src, std::int64_t rows,
               std::int64_t width, std::int64_t ld) {
  with_isa([&] {
    for (std::int64_t r = 0; r < rows; r += 2, dst += dst_ld) {
      const BFloat16* const low = src + r * ld;
      if (r + 1 < rows) {
        const BFloat16* const high = low + ld;
        for (std::int64_t j = 0; j < width; ++j)
          dst[j] = static_cast<Pair>(low[j].bits) | static_cast<Pair>(high[j].bits) << 16;
      } else {
        for (std::int64_t j = 0; j < width; ++j) dst[j] = low[j].bits;
      }
      std::fill(dst + width, dst + dst_ld, Pair{0});
    }
  });
}

void pair_cols(Pair* dst, std::int64_t dst_ld, const BFloat16* src, std::int64_t rows,
               std::int64_t width, std::int64_t ld) {
  for (std::int64_t r = 0; r < rows; ++r, dst += dst_ld, src += ld) {
    std::fill(dst + width / 2, dst + dst_ld, Pair{0});
    std::memcpy(dst, src, static_cast<std::size_t>(width) * sizeof(BFloat16));
  }
}

void pair_cols_transposed(Pair* dst, std::int64_t dst_ld, const BFloat16* src, std::int64_t rows,
                          std::int64_t width, std::int64_t ld) {
  const std::int64_t num_pairs = (width + 1) / 2;
  with_isa([&] {
    for (std::int64_t i = 0; i < num_pairs; i += kSide) {
      const std::int64_t first = 2 * i, count = std::min<std::int64_t>(width - first, 2 * kSide);
      const std::int64_t num_here = std::min<std::int64_t>(num_pairs - i, kSide);
      for (std::int64_t r = 0; r < dst_ld; r += kSide) {
        Words block[kSide];
        const std::int64_t num_rows = std::clamp<std::int64_t>(rows - r, 0, kSide);
        if (num_rows == kSide && count == 2 * kSide) {
          for (int j = 0; j < kSide; ++j)
            std::memcpy(&block[j], src + (r + j) * ld + first, sizeof(Words));
        } else {
          std::fill_n(block, kSide, Words{});
          for (std::int64_t j = 0; j < num_rows; ++j)
            std::memcpy(&block[j], src + (r + j) * ld + first,
                        static_cast<std::size_t>(count) * sizeof(BFloat16));
        }
        transpose(block);
        Pair* const to = dst + i * dst_ld + r;
        for (std::int64_t j = 0; j < num_here; ++j)
          std::memcpy(to + j * dst_ld, &block[j], sizeof(Words));
      }
    }
  });
}

}  // namespace tessera::engine
