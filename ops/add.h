// Residual addition.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = a + b, same shape and dtype, f32 or bf16. Keeps a and b, for their identity alone; in
/// backward the gradient is passed on, not copied. Throws InvalidArgument if shapes or dtypes
/// differ.
engine::Tensor add(engine::Tape& tape, const engine::Tensor& a, const engine::Tensor& b);

}  // namespace tessera::ops
