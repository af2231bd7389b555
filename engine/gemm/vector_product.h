// Products of a vector and a matrix. Private to engine/gemm/gemm.cc.
//
// [Note: a vector at a time]
// Such a product reads each element of its matrix once, so it takes as long as memory takes to
// bring them. A library that first copies a matrix into the order of its kernel takes several times
// as long. A model that generates one token at a time does hardly anything else.
#pragma once

#include <cstdint>

namespace tessera::engine {

/// y (n) = x (k) B (k, n), or y +=. Row-major; B may be stored transposed.
struct VectorProduct {
  const float *x, *b;
  float* y;
  std::int64_t ldb, n, k;
  bool b_transposed, accumulate;

  /// Bits depend on values and k alone, and are the same on any CPU. Of a B that is stored
  /// transposed an element of y is the sum of 32 sums, each of every 32nd product; of another one
  /// products are added in the order of k.
  void run() const;
};

}  // namespace tessera::engine
