// Dropout on CUDA streams; defined where CUDA is built. Private to ops.
#pragma once

#include <cstdint>

#include "engine/philox.h"
#include "engine/stream.h"
#include "engine/tape.h"
#include "engine/tensor.h"

namespace tessera::ops {

/// Element i is kept iff the upper 24 bits of random.bits(first_index + i) are at least
/// `threshold`.
struct DropoutMask {
  engine::RandomStream random;
  std::uint64_t first_index;
  std::uint32_t threshold;
  float scale;                                 ///< of what is kept
  const std::int64_t* offset_count = nullptr;  ///< IndexOffset::count; null: none
  std::int64_t offset_numel = 0;
};

/// out[i] = or += in[i] scale, or 0 where the mask drops it. f32 or bf16, alike.
void dropout_cuda(const engine::Stream& stream, const engine::GradTarget& out,
                  const engine::Tensor& in, const DropoutMask& mask);

}  // namespace tessera::ops
