// Products of matrices, one for each of a batch.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

struct BmmOptions {
  bool transpose_a = false;  ///< a is (B, K, M)
  bool transpose_b = false;  ///< b is (B, N, K)
};

/// y[i] = a[i] b[i], or of their transposes.
///   a (B, M, K), b (B, K, N), of one dtype, f32 or bf16 -> y (B, M, N) like them; a and b may be
///   one tensor. Sums are f32, and y is rounded once. da[i] = dy[i] b[i]^T, db[i] = a[i]^T dy[i].
///   Saves b if somebody wants the gradient of a, and a if somebody wants that of b.
///   One product after the other, by engine::gemm() on the CPU and engine::gemm_cuda() on a GPU:
///   many small ones take the time of as many launches. Throws InvalidArgument if shapes or dtypes
///   do not fit.
engine::Tensor bmm(engine::Tape& tape, const engine::Tensor& a, const engine::Tensor& b,
                   const BmmOptions& options = {});

}  // namespace tessera::ops
