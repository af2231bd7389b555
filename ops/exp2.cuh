// Powers of two on a GPU.
#pragma once

#include "engine/cuda_launch.cuh"

namespace tessera::ops {

/// 2^x to 2 ulp, by one instruction; 0 for -inf.
__device__ inline float exp2_approx(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

}  // namespace tessera::ops
