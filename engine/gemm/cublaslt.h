// Matrix products through cublasLt. Private to gemm_cuda().
#pragma once

#include "engine/gemm/gemm_cuda.h"

namespace tessera::engine {

/// Enqueues `product`, C not transposed, or returns false if cublasLt has no algorithm for it.
/// Descriptors and choices are kept with the stream. Throws DeviceError.
bool cublaslt_gemm(const Stream& stream, const Memory& memory, const DeviceProduct& product);

/// For record_gemms().
void note_gemm(const Stream& stream, const DeviceProduct& product);

/// Takes and gives back as much of `memory` as a product may ask for.
void reserve_gemm_workspace(const Memory& memory);

}  // namespace tessera::engine
