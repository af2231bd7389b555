#include "ops/losses/weighted_cross_entropy_cuda.h"

#include <limits>

#include "engine/cuda_launch.cuh"
#include "ops/losses/terms.h"
#include "ops/pointwise.cuh"

namespace tessera::ops {

using engine::Stream;
using engine::Tensor;

namespace {

__global__ void target_weights_kernel(float* weights, const float* class_weights,
                                      std::int64_t num_classes, const std::int32_t* targets,
                                      std::int64_t count, std::int32_t ignore_index) {
  for (std::int64_t i = engine::stride_begin(); i < count; i += engine::stride_step()) {
    const std::int64_t target = targets[i];
    if (target == ignore_index) {
      weights[i] = 0.0f;
    } else {
      const bool known = target >= 0 && target < num_classes;
      weights[i] = known ? class_weights[target] : std::numeric_limits<float>::quiet_NaN();
    }
  }
}

}  // namespace

template void pointwise_cuda(const Stream&, const Pointwise<InverseOrZero>&);

void target_weights_cuda(const Stream& stream, const Tensor& weights, const Tensor& class_weights,
                         const Tensor& targets, std::int32_t ignore_index) {
  engine::launch_kernel(
      stream, engine::stride_shape(weights.numel()), target_weights_kernel, weights.data<float>(),
      static_cast<const float*>(class_weights.data<float>()), class_weights.numel(),
      static_cast<const std::int32_t*>(targets.data<std::int32_t>()), weights.numel(),
      ignore_index);
}

}  // namespace tessera::ops
