// Repetition of a tensor in dimensions where it has one element.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y of `shape`, to which x is repeated: from the last dimension on, each dimension of x is that of
/// `shape` or 1, and those that x lacks are added in front, as in NumPy. f32 or bf16. The gradient
/// is summed over what was repeated, as ops::sum() of dims/reduce.h sums, and in f32 until it is
/// written. So add(tape, x, broadcast(tape, bias, x.shape())). Keeps x, for its identity alone.
/// Throws InvalidArgument if the shapes do not fit, or for another dtype.
engine::Tensor broadcast(engine::Tape& tape, const engine::Tensor& x, const engine::Shape& shape);

}  // namespace tessera::ops
