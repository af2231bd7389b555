// Two bf16 in one word, as kernels move and multiply them. Private to ops.
#pragma once

#include <bit>
#include <cstdint>

#include "engine/cuda_launch.cuh"

namespace tessera::ops {

/// Two f32 rounded to nearest bf16, `low` in the lower half.
inline __device__ std::uint32_t pack_bf16(float low, float high) {
#if defined(__CUDACC__)
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return static_cast<std::uint32_t>(engine::BFloat16::from_float(low).bits) |
         static_cast<std::uint32_t>(engine::BFloat16::from_float(high).bits) << 16;
#endif
}

/// The one of two.
inline __device__ float low_bf16(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }
inline __device__ float high_bf16(std::uint32_t pair) {
  return std::bit_cast<float>(pair & 0xFFFF0000u);
}

}  // namespace tessera::ops
