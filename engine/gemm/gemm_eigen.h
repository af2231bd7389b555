// Eigen's matrix product: for small matrices, and where oneDNN is missing. Private to
// engine/gemm/gemm.cc.
//
// [Note: which part of Eigen]
// Eigen's packed kernel suits the shapes of a transformer, and it is called
// directly: the expression `c.noalias() += a * b` would send vectors and small matrices to other
// kernels whose order of additions depends on the alignment of the pointers, and would choose its
// blocks, and so the splits of K that reach the bits, by the caches of this machine.
//
// Its kernels are written with intrinsics, so gemm_eigen.cc is compiled once for each level of
// engine/isa.h that it serves, with a name of its own for everything in Eigen: the linker must not
// take an inline function of the one for the other.
#pragma once

#include <cstdint>

namespace tessera::engine {

/// Column-major operands, or the transposes of row-major ones.
struct EigenProduct {
  const float *a, *b;
  float* c;
  std::int64_t lda, ldb, ldc, m, n, k;
  bool a_row_major, b_row_major;
};

/// C (m, n) += A (m, k) B (k, n), C column-major.
namespace v2 {
void add_product(const EigenProduct& product);
extern const int kEigenVersion[3];
}  // namespace v2
namespace v3 {
void add_product(const EigenProduct& product);
}

}  // namespace tessera::engine
