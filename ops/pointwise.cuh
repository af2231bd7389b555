// The CUDA side of ops/pointwise.h, for the .cu files that instantiate pointwise_cuda().
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "engine/cuda_launch.cuh"
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

// Elements [i, i + kWidth).
template <int kWidth, bool kAligned, class F, class T>
__device__ void write_pointwise(T* out, bool accumulate, const F& f,
                                const PointwiseInputs<T, F::kNumInputs>& inputs, std::int64_t i) {
  float in[F::kNumInputs][kWidth], result[kWidth];
#pragma unroll
  for (int n = 0; n < F::kNumInputs; ++n) read_vector<kWidth, kAligned>(in[n], inputs.data[n] + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    float x[F::kNumInputs];
#pragma unroll
    for (int n = 0; n < F::kNumInputs; ++n) x[n] = in[n][k];
    result[k] = call(f, x, std::make_index_sequence<static_cast<std::size_t>(F::kNumInputs)>());
  }
  write_vector<kWidth, kAligned>(out + i, result, accumulate);
}

template <class F, bool kAligned, class T>
__global__ void pointwise_kernel(T* out, bool accumulate, F f,
                                 PointwiseInputs<T, F::kNumInputs> inputs, std::int64_t numel) {
  constexpr int kWidth = kVectorWidth<T>;
  for (std::int64_t i = engine::stride_begin() * kWidth; i < numel;
       i += engine::stride_step() * kWidth) {
    if (i + kWidth <= numel) {
      write_pointwise<kWidth, kAligned>(out, accumulate, f, inputs, i);
    } else {
      for (std::int64_t j = i; j < numel; ++j)
        write_pointwise<1, false>(out, accumulate, f, inputs, j);
    }
  }
}

template <class F, std::size_t... n>
void launch_pointwise_kernel(const engine::Stream& stream, const Pointwise<F>& p,
                             std::index_sequence<n...>) {
  engine::dispatch_float(p.out.dst.dtype(), "pointwise", [&](auto t) {
    using T = decltype(t);
    constexpr int kWidth = kVectorWidth<T>;
    T* out = p.out.dst.template data<T>();
    const PointwiseInputs<T, F::kNumInputs> inputs{{p.in[n].template data<T>()...}};
    const auto kernel = are_aligned<kWidth>(out, inputs.data[n]...) ? pointwise_kernel<F, true, T>
                                                                    : pointwise_kernel<F, false, T>;
    const std::int64_t numel = p.out.dst.numel();
    engine::launch_kernel(stream, engine::stride_shape((numel + kWidth - 1) / kWidth), kernel, out,
                          p.out.accumulate, p.f, inputs, numel);
  });
}

}  // namespace internal

template <class F>
void pointwise_cuda(const engine::Stream& stream, const Pointwise<F>& p) {
  constexpr auto kNumInputs = static_cast<std::size_t>(F::kNumInputs);
  internal::launch_pointwise_kernel(stream, p, std::make_index_sequence<kNumInputs>());
}

}  // namespace tessera::ops
