#include <limits>

#include "engine/cuda.h"
#include "engine/cuda_launch.cuh"
#include "ops/index/gather_cuda.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::store_f32;
using engine::Stream;
using engine::Tensor;
using engine::to_f32;

namespace {

template <class T>
__global__ void gather_kernel(T* y, const T* x, const std::int32_t* index, std::int64_t rows,
                              std::int64_t cols) {
  for (std::int64_t r = engine::stride_begin(); r < rows; r += engine::stride_step()) {
    const std::int64_t c = index[r];
    const bool known = c >= 0 && c < cols;
    store_f32(y[r], known ? to_f32(x[r * cols + c]) : std::numeric_limits<float>::quiet_NaN());
  }
}

template <class T>
__global__ void scatter_kernel(T* dx, bool accumulate, const T* dy, const std::int32_t* index,
                               std::int64_t rows, std::int64_t cols) {
  for (std::int64_t r = engine::stride_begin(); r < rows; r += engine::stride_step()) {
    const std::int64_t c = index[r];
    if (c < 0 || c >= cols) continue;
    T& d = dx[r * cols + c];
    store_f32(d, accumulate ? to_f32(d) + to_f32(dy[r]) : to_f32(dy[r]));
  }
}

}  // namespace

void gather_forward_cuda(const Stream& stream, const Tensor& y, const Tensor& x,
                         const Tensor& index) {
  engine::dispatch_float(x.dtype(), "gather", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, engine::stride_shape(y.numel()), gather_kernel<T>, y.data<T>(),
                          static_cast<const T*>(x.data<T>()),
                          static_cast<const std::int32_t*>(index.data<std::int32_t>()), y.numel(),
                          x.dim(-1));
  });
}

void gather_backward_cuda(const Stream& stream, const GradTarget& dx, const Tensor& dy,
                          const Tensor& index) {
  if (!dx.accumulate) engine::cuda::fill(stream, dx.dst.raw(), 0, dx.dst.nbytes());
  engine::dispatch_float(dy.dtype(), "gather", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, engine::stride_shape(dy.numel()), scatter_kernel<T>,
                          dx.dst.data<T>(), dx.accumulate, static_cast<const T*>(dy.data<T>()),
                          static_cast<const std::int32_t*>(index.data<std::int32_t>()), dy.numel(),
                          dx.dst.dim(-1));
  });
}

}  // namespace tessera::ops
