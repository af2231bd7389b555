#include "ops/column_sums.cuh"
#include "ops/vector_access.cuh"

namespace tessera::ops {

using engine::GradTarget;
using engine::Memory;
using engine::store_f32;
using engine::Stream;
using engine::Tensor;
using engine::to_f32;

namespace {

template <class T, bool kAligned>
__global__ void part_sums_kernel(float* sums, const T* src, std::int64_t rows, std::int64_t cols,
                                 std::int64_t rows_per_part) {
  sum_part<4>(sums, rows, cols, rows_per_part,
              [=](float(&x)[kColsPerThread], std::int64_t row, std::int64_t col, int count) {
                const T* from = src + row * cols + col;
                if (count >= kColsPerThread) return read_vector<kColsPerThread, kAligned>(x, from);
#pragma unroll
                for (int k = 0; k < kColsPerThread; ++k) x[k] = k < count ? to_f32(from[k]) : 0.0f;
              });
}

constexpr int kWarp = 32,
              kSummands = 8;  // columns of a block, and of each the rows at work at once

// dst = or += the sum of the rows of `src` (num, cols).
template <class Out>
__global__ void sum_parts_kernel(Out* dst, bool accumulate, const float* src, std::int64_t num,
                                 std::int64_t cols) {
  __shared__ float sums[kSummands][kWarp];
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0;
  if (c < cols) {
#pragma unroll 8
    for (std::int64_t p = threadIdx.y; p < num; p += kSummands) sum += src[p * cols + c];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  for (int s = 1; s < kSummands; ++s) sum += sums[s][threadIdx.x];
  store_f32(dst[c], accumulate ? to_f32(dst[c]) + sum : sum);
}

}  // namespace

void column_sums_cuda(const Stream& stream, const Memory& memory, const GradTarget& dst,
                      const Tensor& x) {
  const Tensor sums = empty_part_sums(memory, x);
  part_sums_cuda(stream, sums.data<float>(), x.dtype(), x.raw(), x.shape().rows(), x.dim(-1));
  sum_parts_cuda(stream, dst, sums);
}

void part_sums_cuda(const Stream& stream, float* sums, engine::DType dtype, const void* x,
                    std::int64_t rows, std::int64_t cols) {
  const RowParts parts(rows);
  engine::dispatch_float(dtype, "column_sums", [&](auto t) {
    using T = decltype(t);
    const T* src = static_cast<const T*>(x);
    const bool aligned = are_aligned<kColsPerThread>(src) && cols % kColsPerThread == 0;
    engine::launch_kernel(stream, part_sums_shape(parts, cols),
                          aligned ? part_sums_kernel<T, true> : part_sums_kernel<T, false>, sums,
                          src, rows, cols, parts.rows_each);
  });
}

void sum_parts_cuda(const Stream& stream, const GradTarget& dst, const Tensor& x) {
  const std::int64_t cols = x.dim(-1);
  engine::dispatch_float(dst.dst.dtype(), "column_sums", [&](auto g) {
    using G = decltype(g);
    engine::launch_kernel(stream,
                          {.grid = dim3(static_cast<unsigned>((cols + kWarp - 1) / kWarp)),
                           .block = dim3(kWarp, kSummands)},
                          sum_parts_kernel<G>, dst.dst.data<G>(), dst.accumulate, x.data<float>(),
                          x.dim(0), cols);
  });
}

}  // namespace tessera::ops
