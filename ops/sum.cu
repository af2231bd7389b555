#include "engine/cuda_launch.cuh"
#include "ops/sum_cuda.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::store_f32;
using engine::Stream;
using engine::Tensor;
using engine::to_f32;

namespace {

__device__ double to_double(double x) { return x; }
template <class T>
__device__ double to_double(T x) {
  return double{to_f32(x)};
}

// dst[blockIdx.x] = the sum of a chunk; of everything with one block and chunk = numel. One thread
// per lane.
template <class Out, class T>
__global__ void __launch_bounds__(kSumLanes)
    sum_kernel(Out* dst, const T* x, std::int64_t numel, std::int64_t chunk) {
  __shared__ double lanes[kSumLanes];
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t begin = std::int64_t{blockIdx.x} * chunk;
  const std::int64_t end = begin + chunk < numel ? begin + chunk : numel;
  double sum = 0;
#pragma unroll 8
  for (std::int64_t i = begin + lane; i < end; i += kSumLanes) sum += to_double(x[i]);
  lanes[lane] = sum;
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) lanes[lane] += lanes[lane + half];
  }
  if (lane == 0) dst[blockIdx.x] = static_cast<Out>(lanes[0]);
}

template <class T>
__global__ void broadcast_kernel(T* dst, const float* value, std::int64_t numel, bool accumulate) {
  const float d = *value;
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step())
    store_f32(dst[i], accumulate ? to_f32(dst[i]) + d : d);
}

}  // namespace

void sum_forward_cuda(const Stream& stream, const Tensor& y, const Tensor& x,
                      const Tensor& chunk_sums) {
  const std::int64_t chunks = num_sum_chunks(x.numel());
  auto* sums = reinterpret_cast<double*>(chunk_sums.raw());
  const dim3 block(static_cast<unsigned>(kSumLanes));
  engine::dispatch_float(x.dtype(), "sum", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, {.grid = dim3(static_cast<unsigned>(chunks)), .block = block},
                          sum_kernel<double, T>, sums, static_cast<const T*>(x.data<T>()),
                          x.numel(), kSumChunk);
  });
  engine::launch_kernel(stream, {.grid = dim3(1), .block = block}, sum_kernel<float, double>,
                        y.data<float>(), static_cast<const double*>(sums), chunks, chunks);
}

void sum_backward_cuda(const Stream& stream, const GradTarget& dx, const Tensor& dy) {
  engine::dispatch_float(dx.dst.dtype(), "sum", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, engine::stride_shape(dx.dst.numel()), broadcast_kernel<T>,
                          dx.dst.data<T>(), static_cast<const float*>(dy.data<float>()),
                          dx.dst.numel(), dx.accumulate);
  });
}

}  // namespace tessera::ops
