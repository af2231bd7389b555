// Another dtype, and values without their gradient.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// The elements of x as `dtype`, f32 or bf16, rounded to the nearest. The gradient is that of y in
/// the dtype of x. If x has that dtype y is x itself. Keeps x, for its identity alone. Throws
/// InvalidArgument for another dtype.
engine::Tensor cast(engine::Tape& tape, const engine::Tensor& x, engine::DType dtype);

/// A copy of x, f32 or bf16, that is data: no gradient passes through it to x. Throws
/// InvalidArgument for another dtype.
engine::Tensor stop_gradient(engine::Tape& tape, const engine::Tensor& x);

}  // namespace tessera::ops
