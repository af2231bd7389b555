#include "engine/cuda_launch.cuh"
#include "ops/route_cuda.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Stream;
using engine::Tensor;

namespace {

template <class T>
__global__ void choose_kernel(RouteView view, const T* logits) {
  for (std::int64_t n = engine::stride_begin(); n < view.num_tokens; n += engine::stride_step())
    view.choose(logits, n);
}

// A thread an expert, in one block: places depend on all tokens before.
__global__ void place_kernel(RouteView view) {
  for (std::int64_t e = threadIdx.x; e < view.num_experts; e += blockDim.x) view.place(e);
  __syncthreads();
  if (threadIdx.x == 0) view.balance();
}

template <class T>
__global__ void backward_kernel(RouteView view, T* dlogits, bool accumulate, const float* dgates,
                                const float* daux) {
  for (std::int64_t n = engine::stride_begin(); n < view.num_tokens; n += engine::stride_step())
    view.backward(dlogits, accumulate, dgates, daux, n);
}

}  // namespace

void route_forward_cuda(const Stream& stream, const RouteView& view, const Tensor& logits) {
  engine::dispatch_float(logits.dtype(), "route", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, engine::stride_shape(view.num_tokens), choose_kernel<T>, view,
                          static_cast<const T*>(logits.data<T>()));
  });
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(256)}, place_kernel, view);
}

void route_backward_cuda(const Stream& stream, const RouteView& view, const GradTarget& dlogits,
                         const float* dgates, const float* daux) {
  engine::dispatch_float(dlogits.dst.dtype(), "route", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, engine::stride_shape(view.num_tokens), backward_kernel<T>, view,
                          dlogits.dst.data<T>(), dlogits.accumulate, dgates, daux);
  });
}

}  // namespace tessera::ops
