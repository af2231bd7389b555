// The CUDA side of ops/pointwise.h, for the .cu files that instantiate pointwise_cuda().
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "engine/cuda_launch.cuh"
#include "ops/column_sums.cuh"
#include "ops/pointwise.h"
#include "ops/vector_access.cuh"

namespace tessera::ops {
namespace internal {

template <class T, int kNumInputs>
struct PointwiseInputs {
  const T* data[kNumInputs];
};

template <class F, std::size_t... n>
__device__ float call(const F& f, const float (&x)[sizeof...(n)], std::index_sequence<n...>) {
  return f(x[n]...);
}

// Elements [i, i + kWidth), which are also given back as they are stored.
template <int kWidth, bool kAligned, class F, class T>
__device__ void write_pointwise(float (&result)[kWidth], T* out, bool accumulate, const F& f,
                                const PointwiseInputs<T, F::kNumInputs>& inputs, std::int64_t i) {
  float in[F::kNumInputs][kWidth];
#pragma unroll
  for (int n = 0; n < F::kNumInputs; ++n) read_vector<kWidth, kAligned>(in[n], inputs.data[n] + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    float x[F::kNumInputs];
#pragma unroll
    for (int n = 0; n < F::kNumInputs; ++n) x[n] = in[n][k];
    result[k] = call(f, x, std::make_index_sequence<static_cast<std::size_t>(F::kNumInputs)>());
  }
  write_and_round<kWidth, kAligned>(out + i, result, accumulate);
}

template <class F, bool kAligned, class T>
__global__ void pointwise_kernel(T* out, bool accumulate, F f,
                                 PointwiseInputs<T, F::kNumInputs> inputs, std::int64_t numel) {
  constexpr int kWidth = kVectorWidth<T>;
  for (std::int64_t i = engine::stride_begin() * kWidth; i < numel;
       i += engine::stride_step() * kWidth) {
    if (i + kWidth <= numel) {
      float result[kWidth];
      write_pointwise<kWidth, kAligned>(result, out, accumulate, f, inputs, i);
    } else {
      float result[1];
      for (std::int64_t j = i; j < numel; ++j)
        write_pointwise<1, false>(result, out, accumulate, f, inputs, j);
    }
  }
}

// The elements of pointwise_kernel(), and the sums of the columns of `out` (rows, cols).
template <class F, bool kAligned, class T>
__global__ void pointwise_sums_kernel(T* out, bool accumulate, F f,
                                      PointwiseInputs<T, F::kNumInputs> inputs, float* sums,
                                      std::int64_t rows, std::int64_t cols,
                                      std::int64_t rows_per_part) {
  sum_part<1>(sums, rows, cols, rows_per_part,
              [&](float(&x)[kColsPerThread], std::int64_t row, std::int64_t col, int count) {
                const std::int64_t i = row * cols + col;
                if (count == kColsPerThread)
                  return write_pointwise<kColsPerThread, kAligned>(x, out, accumulate, f, inputs,
                                                                   i);
#pragma unroll
                for (int k = 0; k < kColsPerThread; ++k) {
                  float result[1] = {0};
                  if (k < count)
                    write_pointwise<1, false>(result, out, accumulate, f, inputs, i + k);
                  x[k] = result[0];
                }
              });
}

template <class F, class T>
void launch_elements(const engine::Stream& stream, T* out, bool accumulate, const F& f,
                     const PointwiseInputs<T, F::kNumInputs>& inputs, std::int64_t numel) {
  constexpr int kWidth = kVectorWidth<T>;
  bool aligned = are_aligned<kWidth>(out);
  for (const T* in : inputs.data) aligned = aligned && are_aligned<kWidth>(in);
  engine::launch_kernel(stream, engine::stride_shape((numel + kWidth - 1) / kWidth),
                        aligned ? pointwise_kernel<F, true, T> : pointwise_kernel<F, false, T>, out,
                        accumulate, f, inputs, numel);
}

// Writes `out` (rows, cols), and `sums` of its columns, in parts.
template <class F, class T>
void launch_elements_and_sums(const engine::Stream& stream, T* out, bool accumulate, const F& f,
                              const PointwiseInputs<T, F::kNumInputs>& inputs, float* sums,
                              std::int64_t rows, std::int64_t cols) {
  const RowParts parts(rows);
  bool aligned = cols % kColsPerThread == 0 && are_aligned<kColsPerThread>(out);
  for (const T* in : inputs.data) aligned = aligned && are_aligned<kColsPerThread>(in);
  engine::launch_kernel(
      stream, part_sums_shape(parts, cols),
      aligned ? pointwise_sums_kernel<F, true, T> : pointwise_sums_kernel<F, false, T>, out,
      accumulate, f, inputs, sums, rows, cols, parts.rows_each);
}

template <class F, std::size_t... n>
void launch_pointwise_kernel(const engine::Stream& stream, const Pointwise<F>& p,
                             std::index_sequence<n...>) {
  engine::dispatch_float(p.out.dst.dtype(), "pointwise", [&](auto t) {
    using T = decltype(t);
    T* out = p.out.dst.template data<T>();
    const PointwiseInputs<T, F::kNumInputs> inputs{{p.in[n].template data<T>()...}};
    if constexpr (SumsColumns<F>) {
      if (p.column_sums.defined()) {
        return launch_elements_and_sums(stream, out, p.out.accumulate, p.f, inputs,
                                        p.column_sums.template data<float>(),
                                        p.out.dst.shape().rows(), p.out.dst.dim(-1));
      }
    }
    launch_elements(stream, out, p.out.accumulate, p.f, inputs, p.out.dst.numel());
  });
}

}  // namespace internal

template <class F>
void pointwise_cuda(const engine::Stream& stream, const Pointwise<F>& p) {
  constexpr auto kNumInputs = static_cast<std::size_t>(F::kNumInputs);
  internal::launch_pointwise_kernel(stream, p, std::make_index_sequence<kNumInputs>());
}

}  // namespace tessera::ops
