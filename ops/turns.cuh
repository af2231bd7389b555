// Blocks of one launch that write to the same memory one after the other. Private to ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "engine/cuda_launch.cuh"

namespace tessera::ops {

// [Note: turns]
// A sum that many blocks add to has one order, and so its bits, if they add by turns: a counter, 0
// before the launch, says how many have added. Who is number n waits until it says n, adds, and
// counts. Three things make that safe:
//   - Nobody waits for a block that may never start. A GPU starts blocks in an order of its own and
//     when there is room, so work is numbered by tickets that blocks draw as they start, and a
//     block waits only for lower tickets. Of the blocks under way, the one with the lowest ticket
//     waits for nobody: those before it are done. So there is always one that goes on, and all end.
//   - What was added is there for the next: end_turn() releases what the warp wrote (__syncwarp
//     makes it happen before), and who sees the count acquires it.
//   - Sums are read and added to in L2, never in the L1 of an SM, which others do not write to.

/// The number of this block among those of the launch that have begun. `tickets` is 0 before the
/// launch. One thread calls it.
inline __device__ unsigned draw_ticket(unsigned* tickets) { return atomicAdd(tickets, 1u); }

/// Waits until `turn` is `number`. All lanes of a warp call it together.
inline __device__ void await_turn(const unsigned* turn, unsigned number) {
  if (threadIdx.x % 32 == 0) {
#if defined(__CUDACC__)
    const auto count = [&] {
      unsigned value;
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(value)
                   : "l"(__cvta_generic_to_global(turn))
                   : "memory");
      return value;
    };
#else
    const auto count = [&] { return cuda_emulation::load_acquire(turn); };
#endif
    while (count() != number) __nanosleep(20);
  }
  __syncwarp();
}

/// Ends turn `number`: what the warp has written is there for the next. All lanes call it together.
inline __device__ void end_turn(unsigned* turn, unsigned number) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
#if defined(__CUDACC__)
  asm volatile("st.release.gpu.global.u32 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(turn)), "r"(number + 1)
               : "memory");
#else
  cuda_emulation::store_release(turn, number + 1);
#endif
}

// Four f32, 16-byte aligned, in L2; additions round to nearest.

inline __device__ void assign_in_l2(float* to, const float (&x)[4]) {
  __stcg(engine::as_wide<float4>(to), make_float4(x[0], x[1], x[2], x[3]));
}

/// x = from + x.
inline __device__ void add_from_l2(float (&x)[4], const float* from) {
  const float4 sum = __ldcg(engine::as_wide<float4>(from));
  x[0] = sum.x + x[0];
  x[1] = sum.y + x[1];
  x[2] = sum.z + x[2];
  x[3] = sum.w + x[3];
}

/// to += x. On sm_90 and later L2 adds, and nothing comes back.
inline __device__ void add_in_l2(float* to, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(to)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
  float sum[4] = {x[0], x[1], x[2], x[3]};
  add_from_l2(sum, to);
  assign_in_l2(to, sum);
#endif
}

}  // namespace tessera::ops
