// Difference of two tensors, element by element.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = a - b, same shape and dtype, f32 or bf16; a and b may be one tensor. Keeps both, for their
/// identity alone. Throws InvalidArgument if shapes or dtypes differ.
engine::Tensor sub(engine::Tape& tape, const engine::Tensor& a, const engine::Tensor& b);

}  // namespace tessera::ops
