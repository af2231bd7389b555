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

/// The bf16 in the lower half of `pair`, or in the upper, as f32.
inline __device__ float low_bf16(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }
inline __device__ float high_bf16(std::uint32_t pair) {
  return std::bit_cast<float>(pair & 0xFFFF0000u);
}

/// The larger of both lower halves, and of both upper ones; of NaN and a number, the number.
inline __device__ std::uint32_t max_bf16(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDACC__)
  std::uint32_t max;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
#else
  return pack_bf16(fmaxf(low_bf16(a), low_bf16(b)), fmaxf(high_bf16(a), high_bf16(b)));
#endif
}

}  // namespace tessera::ops
