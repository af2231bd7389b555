// Quotient of two tensors, element by element.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = a / b, same shape and dtype, f32 or bf16; a and b may be one tensor. Saves b, and a if
/// somebody wants the gradient of b. Throws InvalidArgument if shapes or dtypes differ.
engine::Tensor div(engine::Tape& tape, const engine::Tensor& a, const engine::Tensor& b);

}  // namespace tessera::ops
