// Matrix products through cublasLt. Private to ops, which use gemm_cuda().
#pragma once

#include "ops/gemm_cuda.h"

namespace tessera::ops {

/// Enqueues `product`, C not transposed, or returns false if cublasLt has no algorithm for it.
/// Descriptors and choices are kept with the stream. Throws DeviceError.
bool cublaslt_gemm(const engine::Stream& stream, const engine::Memory& memory,
                   const DeviceProduct& product);

}  // namespace tessera::ops
