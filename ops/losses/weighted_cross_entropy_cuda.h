// ops::target_weights on CUDA streams; defined where CUDA is built. Private to ops.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::ops {

/// weights[i] = class_weights[targets[i]]; 0 for `ignore_index`, else NaN for a target that is no
/// class.
void target_weights_cuda(const engine::Stream& stream, const engine::Tensor& weights,
                         const engine::Tensor& class_weights, const engine::Tensor& targets,
                         std::int32_t ignore_index);

}  // namespace tessera::ops
