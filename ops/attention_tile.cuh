// Tiles of bf16 rows in shared memory and their products on tensor cores, for attention.
#pragma once

#include <bit>
#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "ops/bf16_pair.cuh"
#include "ops/exp2.cuh"
#include "ops/mma.cuh"

namespace tessera::ops::flash {

using engine::BFloat16;
using engine::Packed;

// [Note: attention fragments]
// A block has kWarps warps; each owns kM * 16 rows of what the block owns, and all of them walk the
// same tiles of the other side, which are loaded one tile ahead. The scores of a warp are kM * n
// fragments of m16n8k16: lane l holds, of fragment j, rows l / 4 and l / 4 + 8, columns
// 8 * j + 2 * (l % 4) and the next. Two neighbouring fragments, rounded to bf16, are laid out as
// the left operand of the next product: probabilities never leave the registers. Rows in shared
// memory are 16 bytes longer than the head, so that 8 of them, 16 bytes each, lie in different
// banks. Heads are padded with zeros to 32, 64, 96 or 128, and so are rows beyond T.
inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr float kLog2E = 1.4426950408889634f;

template <int kSize>
inline constexpr int kPitch = kSize + 8;

/// Rows of one head, `stride` elements apart. What lies between rows fits 31 bits.
template <class T>
struct Rows {
  T* data;
  int stride;

  __device__ Rows(T* data, std::int64_t stride) : data(data), stride(static_cast<int>(stride)) {}
  __device__ T* at(int row) const { return data + static_cast<std::int64_t>(row) * stride; }
};

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x / 32); }

/// Begins to fill `tile` (kRows, kSize) with rows [row, row + kRows) of `src`, zeros where there
/// are none. It is there after cp_async_commit, cp_async_wait and __syncthreads. `kVector`: 16
/// bytes at a time, which head_size, stride and address must allow.
template <bool kVector, int kRows, int kSize>
__device__ void load_tile(BFloat16* tile, Rows<const BFloat16> src, int row, int num_rows,
                          int head_size) {
  constexpr int kLanes = std::bit_ceil(unsigned{kSize / 8});  // of a row, each for 8 elements
  constexpr int kStep = kThreads / kLanes;
  static_assert(kRows % kStep == 0);
  const int r = static_cast<int>(threadIdx.x / kLanes),
            c = static_cast<int>(threadIdx.x % kLanes) * 8;
  if (c >= kSize) return;
  const BFloat16* from = src.at(row + r) + c;
  BFloat16* to = tile + r * kPitch<kSize> + c;
#pragma unroll
  for (int n = 0; n < kRows / kStep; ++n, from += kStep * src.stride, to += kStep * kPitch<kSize>) {
    const bool inside = row + r + n * kStep < num_rows && c < head_size;
    if constexpr (kVector) {
      cp_async_16(to, from, inside);
    } else {
      Packed<BFloat16> chunk{};
      for (int e = 0; e < 8; ++e)
        if (inside && c + e < head_size) chunk.values[e] = from[e];
      chunk.store(to);
    }
  }
}

/// Two neighbouring fragments, whose right operands were loaded together.
__device__ inline void multiply_two(float (&d)[4], float (&next)[4], const std::uint32_t (&a)[4],
                                    const std::uint32_t (&b)[4]) {
  mma_m16n8k16(d, a, {b[0], b[1]});
  mma_m16n8k16(next, a, {b[2], b[3]});
}

/// acc (kM * 16, kN * 8) = a b^T, over the kSize columns of both tiles.
template <int kSize, int kM, int kN>
__device__ void multiply_transposed(float (&acc)[kM][kN][4], const BFloat16* a, const BFloat16* b) {
  const int lane = lane_id();
  const BFloat16* a_lane = a + lane % 16 * kPitch<kSize> + lane / 16 * 8;
  const BFloat16* b_lane = b + (lane % 8 + lane / 16 * 8) * kPitch<kSize> + lane / 8 % 2 * 8;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0;
#pragma unroll
  for (int k = 0; k < kSize; k += 16) {
    std::uint32_t left[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) ldmatrix_x4(left[m], a_lane + m * 16 * kPitch<kSize> + k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      std::uint32_t right[4];
      ldmatrix_x4(right, b_lane + n * 8 * kPitch<kSize> + k);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply_two(acc[m][n], acc[m][n + 1], left[m], right);
    }
  }
}

/// acc (kM * 16, kSize) += p b, over the kN * 8 columns of `p`, rounded to bf16, and rows of `b`.
template <int kSize, int kM, int kN>
__device__ void multiply_add(float (&acc)[kM][kSize / 8][4], const float (&p)[kM][kN][4],
                             const BFloat16* b) {
  const int lane = lane_id();
  const BFloat16* b_lane = b + lane % 16 * kPitch<kSize> + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kN; k += 2) {
    std::uint32_t left[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      left[m][0] = pack_bf16(p[m][k][0], p[m][k][1]);
      left[m][1] = pack_bf16(p[m][k][2], p[m][k][3]);
      left[m][2] = pack_bf16(p[m][k + 1][0], p[m][k + 1][1]);
      left[m][3] = pack_bf16(p[m][k + 1][2], p[m][k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kSize / 8; n += 2) {
      std::uint32_t right[4];
      ldmatrix_x4_trans(right, b_lane + k * 8 * kPitch<kSize> + n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply_two(acc[m][n], acc[m][n + 1], left[m], right);
    }
  }
}

/// acc (kM * 16, kN * 8) = a^T b, over the first `num_rows` rows, rounded up to kStep, of `a` (.,
/// kAPitch) and `b` (., kBPitch).
template <int kAPitch, int kBPitch, int kStep, int kM, int kN>
__device__ void multiply_left_transposed(float (&acc)[kM][kN][4], const BFloat16* a,
                                         const BFloat16* b, int num_rows) {
  const int lane = lane_id();
  const BFloat16* a_lane = a + (lane % 8 + lane / 16 * 8) * kAPitch + lane / 8 % 2 * 8;
  const BFloat16* b_lane = b + lane % 16 * kBPitch + lane / 16 * 8;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0;
#pragma unroll 1
  for (int row = 0; row < num_rows; row += kStep) {
#pragma unroll
    for (int k = row; k < row + kStep; k += 16) {
      std::uint32_t left[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) ldmatrix_x4_trans(left[m], a_lane + k * kAPitch + m * 16);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        std::uint32_t right[4];
        ldmatrix_x4_trans(right, b_lane + k * kBPitch + n * 8);
#pragma unroll
        for (int m = 0; m < kM; ++m) multiply_two(acc[m][n], acc[m][n + 1], left[m], right);
      }
    }
  }
}

/// Writes a warp's fragments, rounded to bf16, to `tile` (kM * 16, kN * 8).
template <int kTilePitch, int kM, int kN>
__device__ void store_fragments(BFloat16* tile, const float (&x)[kM][kN][4]) {
  const int lane = lane_id();
  BFloat16* to = tile + lane / 4 * kTilePitch + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *engine::as_wide<std::uint32_t>(to + (m * 16 + half * 8) * kTilePitch + n * 8) =
            pack_bf16(x[m][n][half * 2], x[m][n][half * 2 + 1]);
    }
  }
}

/// Writes a warp's fragments times `factor` to rows [row, row + kM * 16) of `dst`, or adds them.
/// Leaves in `acc` what is stored, rounded.
template <bool kVector, int kM, int kN>
__device__ void store_rows(Rows<BFloat16> dst, float (&acc)[kM][kN][4], float factor, int row,
                           int num_rows, int head_size, bool accumulate) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + m * 16 + lane / 4 + half * 8;
      if (r >= num_rows) continue;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int c = n * 8 + lane % 4 * 2;
        if (c >= head_size) break;
        BFloat16* to = dst.at(r) + c;
        float &x = acc[m][n][half * 2], &next = acc[m][n][half * 2 + 1];
        x *= factor;
        next *= factor;
        if constexpr (kVector) {
          auto* pair = engine::as_wide<std::uint32_t>(to);
          if (accumulate) {
            const std::uint32_t before = *pair;
            x += low_bf16(before);
            next += high_bf16(before);
          }
          const std::uint32_t stored = pack_bf16(x, next);
          *pair = stored;
          x = low_bf16(stored);
          next = high_bf16(stored);
        } else {
          const auto store = [accumulate](BFloat16& element, float& value) {
            engine::store_f32(element, accumulate ? engine::to_f32(element) + value : value);
            value = engine::to_f32(element);
          };
          store(to[0], x);
          if (c + 1 < head_size) store(to[1], next);
        }
      }
    }
  }
}

}  // namespace tessera::ops::flash
