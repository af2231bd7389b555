// Product of two tensors, element by element.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = a b, same shape and dtype, f32 or bf16; a and b may be one tensor. Saves b if somebody wants
/// the gradient of a, and a if somebody wants that of b. Throws InvalidArgument if shapes or dtypes
/// differ.
engine::Tensor mul(engine::Tape& tape, const engine::Tensor& a, const engine::Tensor& b);

}  // namespace tessera::ops
