// The kernel of gradient_check.cc.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

/// found (1) i64 = max(found, code) if some element of `grad`, f32 or bf16, is not finite.
void check_gradient_cuda(const engine::Stream& stream, const engine::Tensor& found,
                         const engine::Tensor& grad, std::int64_t code);

}  // namespace tessera::shard
