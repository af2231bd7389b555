#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "ops/wgmma.cuh"
#include "tests/ops/wgmma_products.h"

namespace tessera::ops {

using engine::BFloat16;

namespace {

constexpr int kSide = 64, kDepth = 16, kThreads = 128;
constexpr int kTileNbytes = kSide * kPanelRowNbytes;

__device__ std::uint32_t pair_of(BFloat16 low, BFloat16 high) {
  return static_cast<std::uint32_t>(low.bits) | static_cast<std::uint32_t>(high.bits) << 16;
}

// Rows of the panel are those of x, or its columns.
__device__ void store_panel(BFloat16* panel, const BFloat16* x, bool columns) {
  for (int i = static_cast<int>(threadIdx.x); i < kSide * kSide / 2; i += kThreads) {
    const int row = i / (kSide / 2), column = i % (kSide / 2) * 2;
    const BFloat16 low = columns ? x[column * kSide + row] : x[row * kSide + column];
    const BFloat16 high = columns ? x[(column + 1) * kSide + row] : x[row * kSide + column + 1];
    store_operand(panel + panel_at(row, column), pair_of(low, high));
  }
}

template <bool kInRegisters, bool kATransposed, bool kBTransposed>
__global__ void __launch_bounds__(kThreads)
    products_kernel(const BFloat16* a, const BFloat16* b, float* d, bool accumulate) {
  BFloat16* const a_panel = first_atom();
  BFloat16* const b_panel = a_panel + kTileNbytes / sizeof(BFloat16);
  store_panel(a_panel, a, kATransposed);
  store_panel(b_panel, b, !kBTransposed);
  fence_async_proxy();
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int first_row = static_cast<int>(threadIdx.x) / 32 * 16 + g;
  const auto at = [=](int n, int i) {
    return (first_row + 8 * (i / 2)) * kSide + 8 * n + 2 * t + i % 2;
  };
  float sums[8][4];
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = d[at(n, i)];
  std::uint32_t left[kSide / kDepth][4];
#pragma unroll
  for (int k = 0; k < kSide / kDepth; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const BFloat16* const x =
          a + (first_row + 8 * (r % 2)) * kSide + k * kDepth + 2 * t + 8 * (r / 2);
      left[k][r] = pair_of(x[0], x[1]);
    }
  const std::uint64_t a_operand = operand_at(a_panel), b_operand = operand_at(b_panel);
  wgmma_fence(sums, left[0], left[1], left[2], left[3]);
#pragma unroll
  for (int k = 0; k < kSide / kDepth; ++k) {
    const bool adds = accumulate || k > 0;
    const std::uint64_t b_k = advance(b_operand, k * (kBTransposed ? kNextMnMajor : kNextKMajor));
    if constexpr (kInRegisters) {
      wgmma<kBTransposed>(sums, left[k], b_k, adds);
    } else {
      const int next_a = kATransposed ? kNextMnMajor : kNextKMajor;
      wgmma<kATransposed, kBTransposed>(sums, advance(a_operand, k * next_a), b_k, adds);
    }
  }
  wgmma_commit();
  wgmma_wait<0>(sums);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) d[at(n, i)] = sums[n][i];
}

}  // namespace

void wgmma_products_cuda(const engine::Stream& stream, WgmmaOperands operands, const BFloat16* a,
                         const BFloat16* b, float* d, bool accumulate) {
  const auto launch = [&](auto* kernel) {
    engine::launch_kernel(
        stream,
        {.grid = dim3(1), .block = dim3(kThreads), .shared_nbytes = kAtomNbytes + 2 * kTileNbytes},
        kernel, a, b, d, accumulate);
  };
  switch (operands) {
    case WgmmaOperands::kKAndK:
      return launch(products_kernel<false, false, false>);
    case WgmmaOperands::kKAndMn:
      return launch(products_kernel<false, false, true>);
    case WgmmaOperands::kMnAndK:
      return launch(products_kernel<false, true, false>);
    case WgmmaOperands::kMnAndMn:
      return launch(products_kernel<false, true, true>);
    case WgmmaOperands::kRegistersAndK:
      return launch(products_kernel<true, false, false>);
    case WgmmaOperands::kRegistersAndMn:
      return launch(products_kernel<true, false, true>);
  }
}

}  // namespace tessera::ops
