// Tiles of bf16 rows as operands of warpgroup products, for attention.
#pragma once

#include <bit>
#include <cstdint>

#include "ops/attention_tile.cuh"
#include "ops/mma.cuh"
#include "ops/wgmma.cuh"

namespace tessera::ops::flash_wgmma {

using engine::BFloat16;
using engine::Packed;
using flash::Rows;

/// A tile of kRows rows and kSize columns, one panel of 64 columns after the other: see
/// [Note: operands in shared memory].
template <int kRows, int kSize>
struct Tile {
  static_assert(kRows % 8 == 0 && kSize % kPanelColumns == 0);
  static constexpr int kNumel = kRows * kSize;
  static constexpr int kNbytes = kNumel * static_cast<int>(sizeof(BFloat16));
  static constexpr int kPanelNbytes = kRows * kPanelRowNbytes;

  /// From the first column to this one, k of a K-major operand: a multiple of 16.
  static constexpr int k_nbytes(int column) {
    return column / kPanelColumns * kPanelNbytes + column % kPanelColumns / 16 * kNextKMajor;
  }
};

/// The thread's warpgroup; by a shuffle, so that the compiler knows it to be the same in a warp.
inline __device__ int warpgroup_id() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
}

/// Begins to fill `tile` with rows [row, row + kRows) of `src`, zeros where there are none. It is
/// there for products after cp_async_commit, cp_async_wait, fence_async_proxy and a barrier.
/// `kVector`: 16 bytes at a time, which head_size, stride and address must allow.
template <bool kVector, int kThreads, int kRows, int kSize>
__device__ void load_tile(BFloat16* tile, Rows<const BFloat16> src, int row, int num_rows,
                          int head_size) {
  constexpr int kLanes = kSize / 8;  // of a row, each for 8 elements
  constexpr int kStep = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0 && kStep % 8 == 0);  // the swizzle of a thread stays
  const int r = static_cast<int>(threadIdx.x) / kLanes,
            c = static_cast<int>(threadIdx.x) % kLanes * 8;
  const BFloat16* from = src.at(row + r) + c;
  BFloat16* to =
      tile + c / kPanelColumns * (kRows * kPanelColumns) + panel_at(r, c % kPanelColumns);
#pragma unroll
  for (int n = 0; n < kRows; n += kStep, from += kStep * src.stride, to += kStep * kPanelColumns) {
    if (n + kStep > kRows && n + r >= kRows) break;
    const bool inside = row + r + n < num_rows && c < head_size;
    if constexpr (kVector) {
      cp_async_16(to, from, inside);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        BFloat16 x{}, next{};
        if (inside && c + e < head_size) x = from[e];
        if (inside && c + e + 1 < head_size) next = from[e + 1];
        store_operand(to + e, std::uint32_t{x.bits} | std::uint32_t{next.bits} << 16);
      }
    }
  }
}

/// Accumulators of 64 columns, rounded to bf16, as left operands of 16 columns each.
inline __device__ void to_operand(std::uint32_t (&a)[4][4], const float (&d)[8][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      a[k][r] = pack_bf16(d[2 * k + r / 2][r % 2 * 2], d[2 * k + r / 2][r % 2 * 2 + 1]);
  }
}

/// Writes ds^T of a warpgroup, 64 keys by 64 queries, to a panel of 128 keys.
inline __device__ void store_slopes(BFloat16* panel, int warpgroup,
                                    const std::uint32_t (&ds)[4][4]) {
  const int row = warpgroup * 64 + flash::warp_id() % 4 * 16 + flash::lane_id() / 4;
  const int column = flash::lane_id() % 4 * 2;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      store_operand(panel + panel_at(row + r % 2 * 8, k * 16 + r / 2 * 8 + column), ds[k][r]);
  }
}

/// d = a b^T, of the 64 rows of K-major operands, over the kSize columns of their tiles.
template <class TileA, class TileB, int kSize>
__device__ void multiply_transposed(float (&d)[8][4], std::uint64_t a, std::uint64_t b) {
#pragma unroll
  for (int k = 0; k < kSize; k += 16)
    wgmma<false, false>(d, advance(a, TileA::k_nbytes(k)), advance(b, TileB::k_nbytes(k)), k > 0);
}

/// d (64, kN * 8) += a b, where `a` has the columns that `b`, tile TileB, has rows.
template <class TileB, std::size_t kN>
__device__ void multiply_add(float (&d)[kN][4], std::uint32_t (&a)[4][4], std::uint64_t b) {
  static_assert(kN == 8 || kN == 16);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma<true>(d, a[k], advance(b, k * kNextMnMajor), true);
    if constexpr (kN > 8)
      wgmma<true, 8>(d, a[k], advance(b, TileB::kPanelNbytes + k * kNextMnMajor), true);
  }
}

}  // namespace tessera::ops::flash_wgmma
