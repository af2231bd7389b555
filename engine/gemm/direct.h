// Matrix products that read their operands where they lie. Private to engine/gemm/gemm.cc.
//
// [Note: products without packing]
// A library copies both operands of a product into the order in which its kernel reads them. Where
// B has few elements and C few rows, as in a tile of attention, that takes as long as half of the
// product, and B is faster read as it is from the second-level cache. A B that is transposed has to
// be copied, but once for all rows of C. With more elements oneDNN is as fast or faster
// (docs/cpu.md has the figures).
#pragma once

#include <cstdint>

namespace tessera::engine {

/// C (m, n) = A (m, k) B (k, n), or C +=. Row-major; A and B may be stored transposed, B with k of
/// at most kMaxTransposedDepth.
struct DirectProduct {
  const float *a, *b;
  float* c;
  std::int64_t lda, ldb, ldc, m, n, k;
  bool a_transposed, b_transposed, accumulate;

  /// For a CPU with AVX-512. Elements of C are sums in the order of k, each multiplication fused
  /// with its addition, so bits depend on the values alone.
  void run() const;
};

/// Elements of B that the second-level cache holds beside the rest.
inline constexpr std::int64_t kMaxDirectNumel = 1 << 15;
/// Elements and depth of a transposed B that are multiplied so. It is copied first, so C must have
/// this many rows to gain from it.
inline constexpr std::int64_t kMaxTransposedNumel = 1 << 16, kMaxTransposedDepth = 512,
                              kMinTransposedRows = 96;
/// Columns that make whole vectors.
inline constexpr std::int64_t kMinDirectCols = 16;

}  // namespace tessera::engine
