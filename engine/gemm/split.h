// f32 matrix products on the tiles of a CPU, which multiply bf16. Private to engine/gemm/gemm.cc.
//
// [Note: three parts of an f32]
// A CPU with AMX does 16 times as many multiplications of bf16 a cycle as of f32, with sums in f32.
// An f32 has 24 bits of significand, a bf16 8: so it is the sum of three bf16, and a product of two
// is the sum of nine products, each of which f32 holds exactly. The six largest are added, smallest
// first (Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations", 2019, section III).
//
// Error. The three products left out are less than 2^-21.9 of the whole. Sums of 32 columns of A,
// 16 + 1 + 1 additions each, are added to C, six for every 32 columns. So with u = 2^-24
//   |C - exact| <= 1.02 u (6 ceil(k / 32) + 21) sum |a b|  (+ |C| before, times as much)
// where one f32 sum has u k: narrower from k = 34 on. Tiles take numbers below 2^-126 for 0,
// operands, sums and parts alike, which adds at most 2^-126 (3 sum (|a| + |b|) + 7 k + 210).
//
// Not finite. An infinity has the parts infinity, NaN, NaN, so wherever it is multiplied C is NaN,
// where f32 has an infinity or NaN. NaN gives NaN, and sums beyond f32's largest number infinity or
// NaN. A finite number of any size has finite parts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::engine {

/// C (m, n) = A (m, k) B (k, n), or C += ; f32, row-major; A and B may be stored transposed. No
/// side is 0.
struct SplitProduct {
  const float *a, *b;
  float* c;
  std::int64_t lda, ldb, ldc, m, n, k;
  bool a_transposed, b_transposed, accumulate;

  /// Whether it is large enough to gain from tiles.
  bool suits() const;
  /// What run() needs, from a 64-byte boundary on: at most 1 MiB.
  std::int64_t scratch_nbytes() const;
  /// After request_amx(). An element of C is a function of its row of A, its column of B and what
  /// was there; m, n, leading dimensions and addresses are nothing to it.
  void run(std::byte* scratch) const;
  /// What run() does, on any CPU, for tests: hundreds of times slower.
  void run_portably(std::byte* scratch) const;
};

}  // namespace tessera::engine
