// Products of one warpgroup alone, as ops/wgmma.cuh makes them.
#pragma once

#include "engine/dtype.h"
#include "engine/stream.h"

namespace tessera::ops {

/// Where the operands of a product are and which dimension is contiguous in shared memory: K-major
/// or MN-major, A or B; or A in registers.
enum class WgmmaOperands { kKAndK, kKAndMn, kMnAndK, kMnAndMn, kRegistersAndK, kRegistersAndMn };

/// d (64, 64) = a (64, 64) b (64, 64), or +=, on a GPU of compute capability 9.x; row-major, bf16
/// and f32. Four products of depth 16, in one group.
void wgmma_products_cuda(const engine::Stream& stream, WgmmaOperands operands,
                         const engine::BFloat16* a, const engine::BFloat16* b, float* d,
                         bool accumulate);

}  // namespace tessera::ops
