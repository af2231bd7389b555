// The average of one element, and the kernel of ema.cc.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

/// (1 - weight) * a + weight * p, as torch.lerp(): the end that is closer is exact.
constexpr float lerp(float a, float p, float weight) {
  return weight < 0.5f ? a + weight * (p - a) : p - (p - a) * (1 - weight);
}

/// average = lerp(average, master, weight): f32 of equal size.
void lerp_cuda(const engine::Stream& stream, const engine::Tensor& average,
               const engine::Tensor& master, float weight);

}  // namespace tessera::shard
