// Sums of columns of what a warpgroup stores, for attention backward.
#pragma once

#include <cstdint>

#include "ops/attention_backward.cuh"
#include "ops/attention_cuda.h"
#include "ops/attention_tile.cuh"
#include "ops/attention_wgmma.h"

namespace tessera::ops::flash_wgmma {

// [Note: sums of a warpgroup's rows]
// Whoever stores 64 rows of dqkv, a part of [Note: sums of columns], is a warpgroup: 16 rows are a
// warp's, in fragments, so that 8 lanes have rows of the same columns. The lanes add in three
// rounds: each gives half of the columns that it still has to another lane and takes the other
// half. So 64 columns cost 14 shuffles, where a sum of all lanes for each would cost 48, and lane l
// ends with columns 2 l and 2 l + 1. The sums of the four warps meet in shared memory. All of it in
// one order, so that a part has the same bits every time.

/// sums[c] = the sum of column c of a warp's 16 rows, for the 64 columns of x[kFirst], ..., which
/// it uses up. Rows after the last token are zeros, as p is there.
template <int kFirst, int kN>
__device__ void sum_rows(float* sums, float (&x)[kN][4]) {
  constexpr int kHalf = 4;
  static_assert(kFirst + 2 * kHalf <= kN);
  const int lane = flash::lane_id();
#pragma unroll
  for (int n = kFirst; n < kFirst + 2 * kHalf; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) x[n][e] += x[n][e + 2];
  }
#pragma unroll
  for (int count = kHalf; count > 0; count /= 2) {
    const int other = count * 4;  // the lane number's bit
#pragma unroll
    for (int n = kFirst; n < kFirst + count; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool keeps_upper = (lane & other) != 0;
        const float given = keeps_upper ? x[n][e] : x[n + count][e];
        x[n][e] = (keeps_upper ? x[n + count][e] : x[n][e]) + __shfl_xor_sync(~0u, given, other);
      }
    }
  }
  sums[2 * lane] = x[kFirst][0];
  sums[2 * lane + 1] = x[kFirst][1];
}

/// dst[c] = the sum of four warps' sums, `pitch` apart, of each of the `num_columns` (at most 128)
/// columns c. By a warpgroup.
inline __device__ void sum_warps(float* dst, const float* sums, int pitch, int num_columns) {
  const int c = static_cast<int>(threadIdx.x % 128);
  if (c >= num_columns) return;
  dst[c] = sums[c] + sums[c + pitch] + (sums[c + 2 * pitch] + sums[c + 3 * pitch]);
}

/// Where the sums of columns of dqkv from this one on go, of the part of a sample's rows with this
/// one.
inline __device__ float* column_sums_at(const AttentionLayout& s, const flash::BackwardTensors& x,
                                        int b, int row, std::int64_t column) {
  const std::int64_t part = b * parts_of_sample(s) + row / static_cast<int>(kPartRows);
  return x.column_sums + part * s.qkv_width() + column;
}

/// Sums a part of dk or dv, the 64 rows from `row` of what a warpgroup has stored, into the columns
/// from `column` on. `sums`: for kSize of each warp. All threads of the block call it together.
template <int kSize>
__device__ void sum_columns(const AttentionLayout& s, const flash::BackwardTensors& x, int b,
                            int row, int column, float (&stored)[kSize / 8][4], float* sums) {
  const int warp = flash::warp_id();
  __syncthreads();  // nobody reads sums any more
  sum_rows<0>(sums + warp * kSize, stored);
  if constexpr (kSize > 64) sum_rows<8>(sums + warp * kSize + 64, stored);
  __syncthreads();
  if (row < static_cast<int>(s.tokens))
    sum_warps(column_sums_at(s, x, b, row, column), sums + warp / 4 * 4 * kSize, kSize,
              static_cast<int>(s.head_size));
}

}  // namespace tessera::ops::flash_wgmma
