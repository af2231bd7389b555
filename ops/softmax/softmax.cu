#include <limits>

#include "engine/cuda_launch.cuh"
#include "ops/block_sum.h"
#include "ops/lanes.h"
#include "ops/softmax/softmax_cuda.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::store_f32;
using engine::Stream;
using engine::Tensor;
using engine::to_f32;

namespace {

// A warp has a row, and each of its threads a lane of ops/lanes.h: so sums are those of the CPU.

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kWarp == kLanes);

__device__ int this_lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// fold_lanes(): at lane 0 the upper half is added to the lower, and so on. Additions commute, so
// all lanes have the bits of lane 0.
__device__ float fold_sums(float x) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

// block_sum(), for every lane.
template <class Term>
__device__ double warp_sum(std::int64_t numel, Term term) {
  double sum = 0;
  for (std::int64_t first = 0; first < numel; first += kSumBlock) {
    const std::int64_t end = first + kSumBlock < numel ? first + kSumBlock : numel;
    float lane_sum = 0;
    for (std::int64_t i = first + this_lane(); i < end; i += kWarp) lane_sum += term(i);
    sum += double{fold_sums(lane_sum)};
  }
  return sum;
}

// Of a row with NaN, some other number of it or -infinity.
template <class T>
__device__ float warp_max(const T* x, std::int64_t numel) {
  float max = -std::numeric_limits<float>::infinity();
  for (std::int64_t i = this_lane(); i < numel; i += kWarp) max = fmaxf(max, to_f32(x[i]));
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2)
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, mask));
  return max;
}

template <class F, class T>
__global__ void __launch_bounds__(256)
    forward_kernel(T* y, const T* x, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t row = engine::stride_begin() / kWarp; row < rows;
       row += engine::stride_step() / kWarp) {
    const T* in = x + row * cols;
    T* out = y + row * cols;
    const float max = warp_max(in, cols);
    const double sum = warp_sum(cols, [=](std::int64_t i) { return exp(to_f32(in[i]) - max); });
    const auto norm = static_cast<float>(F::kIsLog ? ::log(sum) : sum);
    for (std::int64_t i = this_lane(); i < cols; i += kWarp)
      store_f32(out[i], F::value(to_f32(in[i]) - max, norm));
  }
}

template <class F, class T>
__global__ void __launch_bounds__(256)
    backward_kernel(T* dx, bool accumulate, const T* y, const T* dy, std::int64_t rows,
                    std::int64_t cols) {
  for (std::int64_t row = engine::stride_begin() / kWarp; row < rows;
       row += engine::stride_step() / kWarp) {
    const T* p = y + row * cols;
    const T* d = dy + row * cols;
    T* out = dx + row * cols;
    const auto sum = static_cast<float>(
        warp_sum(cols, [=](std::int64_t i) { return F::term(to_f32(d[i]), to_f32(p[i])); }));
    for (std::int64_t i = this_lane(); i < cols; i += kWarp) {
      const float slope = F::slope(to_f32(d[i]), to_f32(p[i]), sum);
      store_f32(out[i], accumulate ? to_f32(out[i]) + slope : slope);
    }
  }
}

}  // namespace

template <class F>
void softmax_forward_cuda(const Stream& stream, const Tensor& y, const Tensor& x) {
  engine::dispatch_float(x.dtype(), F::kName, [&](auto t) {
    using T = decltype(t);
    const std::int64_t rows = x.shape().rows();
    engine::launch_kernel(stream, engine::stride_shape(rows * kWarp), forward_kernel<F, T>,
                          y.data<T>(), static_cast<const T*>(x.data<T>()), rows, x.dim(-1));
  });
}

template <class F>
void softmax_backward_cuda(const Stream& stream, const GradTarget& dx, const Tensor& y,
                           const Tensor& dy) {
  engine::dispatch_float(y.dtype(), F::kName, [&](auto t) {
    using T = decltype(t);
    const std::int64_t rows = y.shape().rows();
    engine::launch_kernel(stream, engine::stride_shape(rows * kWarp), backward_kernel<F, T>,
                          dx.dst.data<T>(), dx.accumulate, static_cast<const T*>(y.data<T>()),
                          static_cast<const T*>(dy.data<T>()), rows, y.dim(-1));
  });
}

template void softmax_forward_cuda<Softmax>(const Stream&, const Tensor&, const Tensor&);
template void softmax_forward_cuda<LogSoftmax>(const Stream&, const Tensor&, const Tensor&);
template void softmax_backward_cuda<Softmax>(const Stream&, const GradTarget&, const Tensor&,
                                             const Tensor&);
template void softmax_backward_cuda<LogSoftmax>(const Stream&, const GradTarget&, const Tensor&,
                                                const Tensor&);

}  // namespace tessera::ops
