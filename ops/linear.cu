#include "ops/linear_cuda.h"

#include <algorithm>

#include "engine/cuda_launch.cuh"
#include "ops/vector_access.cuh"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Memory;
using engine::store_f32;
using engine::Stream;
using engine::Tensor;
using engine::to_f32;

namespace {

constexpr int kColsPerThread = 8;
constexpr int kThreadsWide = 32;  // a warp reads 256 neighbours of a row
constexpr int kThreadsHigh = 8;

// Eight neighbours from `src`, of which `count` exist.
template <class T, bool kAligned>
__device__ void load_cols(const T* src, int count, float (&x)[kColsPerThread]) {
  if (count >= kColsPerThread) return read_vector<kColsPerThread, kAligned>(x, src);
#pragma unroll
  for (int k = 0; k < kColsPerThread; ++k) x[k] = k < count ? to_f32(src[k]) : 0.0f;
}

// dst[blockIdx.y][j] = (or +=) the sum of the rows_per_block rows from blockIdx.y * rows_per_block.
template <class Out, class In, bool kAligned>
__global__ void column_sums_kernel(Out* dst, const In* src, std::int64_t rows, std::int64_t cols,
                                   std::int64_t rows_per_block, bool accumulate) {
  __shared__ float partial[kThreadsHigh][kColsPerThread][kThreadsWide];
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const std::int64_t first_col = (std::int64_t{blockIdx.x} * kThreadsWide + x) * kColsPerThread;
  const int count =
      static_cast<int>(cols - first_col < kColsPerThread ? (cols > first_col ? cols - first_col : 0)
                                                         : kColsPerThread);
  const std::int64_t begin = blockIdx.y * rows_per_block;
  const std::int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
  float sums[kColsPerThread] = {};
#pragma unroll 4
  for (std::int64_t r = begin + y; r < end; r += kThreadsHigh) {
    float values[kColsPerThread];
    load_cols<In, kAligned>(src + r * cols + first_col, count, values);
#pragma unroll
    for (int k = 0; k < kColsPerThread; ++k) sums[k] += values[k];
  }
#pragma unroll
  for (int k = 0; k < kColsPerThread; ++k) partial[y][k][x] = sums[k];
  __syncthreads();
  // Row k of the threads adds up column k of each thread's eight.
  static_assert(kThreadsHigh == kColsPerThread);
  if (y >= count) return;
  float sum = 0;
#pragma unroll
  for (int high = 0; high < kThreadsHigh; ++high) sum += partial[high][y][x];
  Out& out = dst[blockIdx.y * cols + first_col + y];
  store_f32(out, accumulate ? to_f32(out) + sum : sum);
}

template <class Out, class In>
void launch(const Stream& stream, Out* dst, const In* src, std::int64_t rows, std::int64_t cols,
            std::int64_t rows_per_block, bool accumulate) {
  constexpr std::int64_t kColsPerBlock = kThreadsWide * kColsPerThread;
  const bool aligned = are_aligned<kColsPerThread>(src) && cols % kColsPerThread == 0;
  engine::launch_kernel(
      stream,
      {.grid = dim3(static_cast<unsigned>((cols + kColsPerBlock - 1) / kColsPerBlock),
                    static_cast<unsigned>(
                        std::max<std::int64_t>((rows + rows_per_block - 1) / rows_per_block, 1))),
       .block = dim3(kThreadsWide, kThreadsHigh)},
      aligned ? column_sums_kernel<Out, In, true> : column_sums_kernel<Out, In, false>, dst, src,
      rows, cols, rows_per_block, accumulate);
}

}  // namespace

void column_sums_cuda(const Stream& stream, const Memory& memory, const GradTarget& dst,
                      const Tensor& x) {
  // Enough rows a block to pay for a partial sum, and not more blocks than one block can add up.
  constexpr std::int64_t kMinRows = 128, kMaxParts = 256;
  const std::int64_t rows = x.shape().rows(), cols = x.dim(-1);
  const std::int64_t rows_per_block = std::max(kMinRows, (rows + kMaxParts - 1) / kMaxParts);
  const std::int64_t parts = (rows + rows_per_block - 1) / rows_per_block;
  engine::dispatch_float(x.dtype(), "linear", [&](auto t) {
    engine::dispatch_float(dst.dst.dtype(), "linear", [&](auto g) {
      const auto* src = x.data<decltype(t)>();
      auto* sums = dst.dst.data<decltype(g)>();
      if (parts <= 1) return launch(stream, sums, src, rows, cols, rows_per_block, dst.accumulate);
      const Tensor partial = Tensor::empty(memory, {parts, cols}, DType::kF32, "linear.bias_sums",
                                           Category::kWorkspace);
      launch(stream, partial.data<float>(), src, rows, cols, rows_per_block, false);
      launch(stream, sums, static_cast<const float*>(partial.data<float>()), parts, cols, parts,
             dst.accumulate);
    });
  });
}

}  // namespace tessera::ops
