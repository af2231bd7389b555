// What the kernels of normalisation share. Private to ops.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ops/vector_access.cuh"

namespace tessera::ops {

// [Note: rows and threads of a norm]
// threadIdx.x runs along a row, in whole warps, threadIdx.y over the rows that a block has at work
// at once. A thread keeps its first kWidth columns in registers; columns beyond those that the
// threads of a row cover at once are read again for each pass. Where a row fits the registers of a
// warp, each warp has one to itself. Which thread sums what depends on the shape and dtype alone,
// not on addresses (kAligned) or the GPU, so the bits do as well.
//
// What takes time is to wait: for the rows, and for each other in the sums. So a row is read as
// soon as it can be, backward's next one before the sums of the present one, and a sum takes one
// barrier.

inline constexpr int kWarp = 32, kMaxRowThreads = 1024;

/// values[n] = its sum over the warp, in all lanes.
template <int kCount>
__device__ void warp_sums(float (&values)[kCount]) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) values[n] += __shfl_xor_sync(0xFFFFFFFFu, values[n], mask);
  }
}

/// values[n] = its sum over the threads of the row, in all of them. Called by all of the block, for
/// the `number`th time: two in turn have memory of their own, so that nobody need wait until all
/// have read.
template <int kCount>
__device__ void row_sums(float (&values)[kCount], unsigned number) {
  __shared__ float partial[2][kCount][kMaxRowThreads / kWarp];
  warp_sums(values);
  const unsigned num_warps = blockDim.x / kWarp;  // of the row
  if (num_warps == 1) return;
  const unsigned first = threadIdx.y * num_warps, lane = threadIdx.x % kWarp;
  if (lane == 0) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      partial[number % 2][n][first + threadIdx.x / kWarp] = values[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    values[n] = 0;
    for (unsigned w = 0; w < num_warps; ++w) values[n] += partial[number % 2][n][first + w];
  }
}

/// Threads along a row, at most `max_threads`, by rows at once for about `num_threads` in all.
inline dim3 block_of(std::int64_t cols, int width, int max_threads, int num_threads) {
  const std::int64_t units = (cols + width - 1) / width;
  const auto along = static_cast<int>(
      std::clamp<std::int64_t>((units + kWarp - 1) / kWarp * kWarp, kWarp, max_threads));
  return dim3(static_cast<unsigned>(along),
              static_cast<unsigned>(std::max(num_threads / along, 1)));
}

/// Calls fn with kWidth, the columns a thread takes at once: of 16 bytes, or 1 if they do not come
/// out even.
template <class T, class F>
void dispatch_width(std::int64_t cols, F fn) {
  constexpr int kWidth = kVectorWidth<T>;
  if (cols % kWidth == 0) {
    fn(std::integral_constant<int, kWidth>());
  } else {
    fn(std::integral_constant<int, 1>());
  }
}

}  // namespace tessera::ops
