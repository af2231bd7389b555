// Products of bf16 whose operands the caller lays out once for many products, for ops. A CPU with
// AVX512_BF16 multiplies two neighbours of a row by two of a column at a time and adds both to an
// f32, so two elements that meet in a product lie beside each other: a pair.
//
// [Note: pairs]
// A library that is handed rows has to make pairs of its second operand in every call, which takes
// as long as half of a small product. In attention the same keys and values are multiplied by every
// tile of queries, and what is computed for a tile can be stored in pairs in the first place. Then
// a product of 48 x 64 x 256 runs at the rate of registers, with nothing copied.
#pragma once

#include <cstdint>

#include "engine/dtype.h"

namespace tessera::engine {

/// Two bf16, the first in the low half: elements (2 i, j) and (2 i + 1, j) of a second operand, or
/// (r, 2 i) and (r, 2 i + 1) of a first.
using Pair = std::uint32_t;

/// Whether products of pairs are the fastest of bf16 here: on a CPU with AVX512_BF16 and without
/// AMX, unless choose_cpu() insists on a library.
bool multiplies_pairs();

/// Columns of a second operand come in as many.
inline constexpr std::int64_t kPairCols = 16;

/// C (m, n) = A (m, 2 num_pairs) B (2 num_pairs, n), or C +=, with sums in f32. Pair (r, i) of A is
/// a[r * lda + i], or a[i * lda + r] if it is transposed; pair (i, j) of B is b[i * ldb + j]; n is
/// a multiple of kPairCols.
struct PairProduct {
  const Pair* a;
  const Pair* b;
  float* c;
  std::int64_t lda, ldb, ldc, m, n, num_pairs;
  bool a_transposed, accumulate;

  /// Only where the CPU has AVX512_BF16. An element of C is a sum in the order of pairs, so its
  /// bits depend on its row of A and its column of B alone. Numbers below 2^-126 count as 0.
  void run() const;
};

/// Pairs (i, j) of `rows` x `width` elements, `ld` apart: rows 2 i and 2 i + 1, at dst[i * dst_ld +
/// j]. Zeros after them up to an even number of rows and up to dst_ld.
void pair_rows(Pair* dst, std::int64_t dst_ld, const BFloat16* src, std::int64_t rows,
               std::int64_t width, std::int64_t ld);
/// Pairs (r, i) of the same: columns 2 i and 2 i + 1, at dst[r * dst_ld + i]; zeros up to dst_ld.
void pair_cols(Pair* dst, std::int64_t dst_ld, const BFloat16* src, std::int64_t rows,
               std::int64_t width, std::int64_t ld);
/// The transpose of that, at dst[i * dst_ld + r], for i < ceil(width / 2); zeros up to dst_ld, a
/// multiple of 16.
void pair_cols_transposed(Pair* dst, std::int64_t dst_ld, const BFloat16* src, std::int64_t rows,
                          std::int64_t width, std::int64_t ld);

}  // namespace tessera::engine
