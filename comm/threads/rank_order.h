// Sums in rank order on a GPU: the bits of sum_in_rank_order() in kernels.h. Defined where CUDA is
// built.
#pragma once

#include <cstdint>
#include <span>

#include "engine/dtype.h"
#include "engine/stream.h"

namespace tessera::comm {

/// Outs that one call can write.
inline constexpr int kMaxGpuOuts = 64;

/// As sum_in_rank_order(), enqueued on `stream`, whose GPU can reach all of the memory. At most
/// kMaxGpuOuts outs; beyond 64 ins an out may equal only the first 64 of them. Throws DeviceError.
/// Called inside the function given to Stream::launch(), which states the work.
void sum_in_rank_order_on_gpu(const engine::Stream& stream, engine::DType dtype,
                              std::span<const void* const> ins, const float* start,
                              std::span<float* const> outs, std::int64_t numel);

}  // namespace tessera::comm
