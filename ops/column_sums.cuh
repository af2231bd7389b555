// The first step of [Note: sums of columns], for kernels. Private to ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "ops/column_sums.h"

namespace tessera::ops {

inline constexpr int kColsPerThread = 8;
inline constexpr int kThreadsWide = 32;  // a warp is at 256 neighbours of a row
inline constexpr int kThreadsHigh = 8;

/// A block for each part and 256 columns.
inline engine::LaunchShape part_sums_shape(const RowParts& parts, std::int64_t cols) {
  constexpr std::int64_t kColsPerBlock = kThreadsWide * kColsPerThread;
  return {.grid = dim3(static_cast<unsigned>((cols + kColsPerBlock - 1) / kColsPerBlock),
                       static_cast<unsigned>(parts.num)),
          .block = dim3(kThreadsWide, kThreadsHigh)};
}

/// sums[part][j] = the sum of x[k] over the rows of this block's part, where read(x, row, col,
/// count) gives column col + k of a row. `count` of them exist, 0 to 8; the others are to be 0.
/// kUnroll: rows that a thread has at work at once, which helps where nothing is written.
template <int kUnroll, class Read>
__device__ void sum_part(float* sums, std::int64_t rows, std::int64_t cols,
                         std::int64_t rows_per_part, const Read& read) {
  __shared__ float partial[kThreadsHigh][kColsPerThread][kThreadsWide];
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const std::int64_t first_col = (std::int64_t{blockIdx.x} * kThreadsWide + x) * kColsPerThread;
  const int count =
      static_cast<int>(cols - first_col < kColsPerThread ? (cols > first_col ? cols - first_col : 0)
                                                         : kColsPerThread);
  const std::int64_t begin = blockIdx.y * rows_per_part;
  const std::int64_t end = begin + rows_per_part < rows ? begin + rows_per_part : rows;
  float total[kColsPerThread] = {};
#pragma unroll kUnroll
  for (std::int64_t r = begin + y; r < end; r += kThreadsHigh) {
    float values[kColsPerThread];
    read(values, r, first_col, count);
#pragma unroll
    for (int k = 0; k < kColsPerThread; ++k) total[k] += values[k];
  }
#pragma unroll
  for (int k = 0; k < kColsPerThread; ++k) partial[y][k][x] = total[k];
  __syncthreads();
  // Row k of the threads adds up column k of each thread's eight.
  static_assert(kThreadsHigh == kColsPerThread);
  if (y >= count) return;
  float sum = 0;
#pragma unroll
  for (int high = 0; high < kThreadsHigh; ++high) sum += partial[high][y][x];
  sums[blockIdx.y * cols + first_col + y] = sum;
}

}  // namespace tessera::ops
