// Compiled with contraction: a product and its sum are one operation.
#include "engine/gemm/direct.h"

#include <algorithm>
#include <cstring>

#include "engine/isa.h"

namespace tessera::engine {
namespace {

// Vectors alone: of scalars the compiler may vectorise the multiplications without their sums, and
// then they are two operations.
template <int kLanes>
struct Vector {
  using Type [[gnu::vector_size(kLanes * 4)]] = float;
};

// The first kCount lanes; the others are 0.
template <int kCount, class V>
[[gnu::always_inline]] inline void load(V& v, const float* src) {
  v = V{};
  std::memcpy(&v, src, kCount * sizeof(float));
}

// Rows [row, row + kRows) and columns [col, col + kVectors * kCount) of C, in registers. kCount of
// a vector's lanes are used.
template <int kRows, int kVectors, int kLanes, int kCount, bool kTransposed>
[[gnu::always_inline]] inline void multiply_block(const DirectProduct& p, std::int64_t row,
                                                  std::int64_t col) {
  using V = typename Vector<kLanes>::Type;
  const float* const a = p.a + (kTransposed ? row : row * p.lda);
  const float* const b = p.b + col;
  float* const c = p.c + row * p.ldc + col;
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = V{};
      if (p.accumulate) load<kCount>(sums[r][v], c + r * p.ldc + v * kCount);
    }
  for (std::int64_t i = 0; i < p.k; ++i) {
    V x[kVectors];
    for (int v = 0; v < kVectors; ++v) load<kCount>(x[v], b + i * p.ldb + v * kCount);
    for (int r = 0; r < kRows; ++r) {
      const float y = kTransposed ? a[i * p.lda + r] : a[r * p.lda + i];
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x[v] * y;
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      std::memcpy(c + r * p.ldc + v * kCount, &sums[r][v], kCount * sizeof(float));
}

// All rows of columns [col, col + kVectors * kCount): as many as registers hold at a time, then
// what is left.
template <int kVectors, int kLanes, int kCount, bool kTransposed>
[[gnu::always_inline]] inline void multiply_columns(const DirectProduct& p, std::int64_t col) {
  std::int64_t row = 0;
  for (; row + 6 <= p.m; row += 6)
    multiply_block<6, kVectors, kLanes, kCount, kTransposed>(p, row, col);
  for (; row + 2 <= p.m; row += 2)
    multiply_block<2, kVectors, kLanes, kCount, kTransposed>(p, row, col);
  if (row < p.m) multiply_block<1, kVectors, kLanes, kCount, kTransposed>(p, row, col);
}

template <bool kTransposed>
[[gnu::always_inline]] inline void multiply(const DirectProduct& p) {
  std::int64_t col = 0;
  for (; col + 64 <= p.n; col += 64) multiply_columns<4, 16, 16, kTransposed>(p, col);
  for (; col + 32 <= p.n; col += 32) multiply_columns<2, 16, 16, kTransposed>(p, col);
  for (; col + 16 <= p.n; col += 16) multiply_columns<1, 16, 16, kTransposed>(p, col);
  for (; col + 4 <= p.n; col += 4) multiply_columns<1, 4, 4, kTransposed>(p, col);
  for (; col < p.n; ++col) multiply_columns<1, 4, 1, kTransposed>(p, col);
}

// B is the transpose of what is stored: some columns at a time are copied to where they are rows.
template <bool kTransposed>
[[gnu::always_inline]] inline void multiply_by_transpose(const DirectProduct& p) {
  constexpr std::int64_t kCols = 64, kStrip = 16;  // columns of a copy; and read side by side
  alignas(64) float copy[kMaxTransposedDepth * kCols];
  for (std::int64_t col = 0; col < p.n; col += kCols) {
    DirectProduct part = p;
    part.n = std::min(kCols, p.n - col);
    for (std::int64_t begin = 0; begin < part.n; begin += kStrip) {
      const std::int64_t end = std::min(begin + kStrip, part.n);
      for (std::int64_t i = 0; i < p.k; ++i)
        for (std::int64_t j = begin; j < end; ++j) copy[i * kCols + j] = p.b[(col + j) * p.ldb + i];
    }
    part.b = copy;
    part.ldb = kCols;
    part.c = p.c + col;
    multiply<kTransposed>(part);
  }
}

}  // namespace

void DirectProduct::run() const {
  with_isa([this] {
    if (b_transposed) {
      a_transposed ? multiply_by_transpose<true>(*this) : multiply_by_transpose<false>(*this);
    } else {
      a_transposed ? multiply<true>(*this) : multiply<false>(*this);
    }
  });
}

}  // namespace tessera::engine
