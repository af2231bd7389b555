#include "engine/cuda_launch.cuh"
#include "engine/dtype.h"
#include "shard/gradient_check_cuda.h"

namespace tessera::shard {
namespace {

template <class T>
__global__ void check_kernel(unsigned long long* found, const T* grad, std::int64_t numel,
                             unsigned long long code) {
  bool is_finite = true;
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step()) {
    const unsigned bits = __float_as_uint(engine::to_f32(grad[i]));
    is_finite = is_finite && (bits & 0x7F800000) != 0x7F800000;
  }
  if (!is_finite) atomicMax(found, code);
}

}  // namespace

void check_gradient_cuda(const engine::Stream& stream, const engine::Tensor& found,
                         const engine::Tensor& grad, std::int64_t code) {
  engine::dispatch_float(grad.dtype(), "check_gradient", [&](auto type) {
    using T = decltype(type);
    engine::launch_kernel(stream, engine::stride_shape(grad.numel()), check_kernel<T>,
                          reinterpret_cast<unsigned long long*>(found.raw()), grad.data<T>(),
                          grad.numel(), static_cast<unsigned long long>(code));
  });
}

}  // namespace tessera::shard
