// What gelu() is made of, for an op that does it along with something else. Private to ops.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tape.h"
#include "ops/vector_math.h"

namespace tessera::ops {

inline constexpr double kTanhGeluFlops = kSigmoidFlops + 6;  ///< of an element

/// y[i] = gelu(x[i]), tanh, for `numel` elements f32 or bf16.
void tanh_gelu_cuda(const engine::Stream& stream, engine::DType dtype, void* y, const void* x,
                    std::int64_t numel);

/// What gelu() does but compute: for a y that holds, or is to hold, gelu(h), tanh.
void record_tanh_gelu(engine::Tape& tape, const engine::Tensor& h, const engine::Tensor& y);

}  // namespace tessera::ops
