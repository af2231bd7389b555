#include "engine/cuda_launch.cuh"
#include "shard/ema_cuda.h"

namespace tessera::shard {
namespace {

__global__ void lerp_kernel(float* average, const float* master, std::int64_t numel, float weight) {
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step()) {
    average[i] = lerp(average[i], master[i], weight);
  }
}

}  // namespace

void lerp_cuda(const engine::Stream& stream, const engine::Tensor& average,
               const engine::Tensor& master, float weight) {
  engine::launch_kernel(stream, engine::stride_shape(average.numel()), lerp_kernel,
                        average.data<float>(), static_cast<const float*>(master.data<float>()),
                        average.numel(), weight);
}

}  // namespace tessera::shard
