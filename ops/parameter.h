// A parameter among tensors.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// The value of p as a tensor of its shape and dtype, f32 or bf16, for ops that take no parameters:
/// learned scales, positions, tokens of a class. So
/// add(tape, x, broadcast(tape, parameter(tape, p), x.shape())). It is a copy, as p itself may be
/// resharded before the tensor is used. Its gradient is that of p; saves nothing. Throws
/// InvalidArgument for another dtype, or if p has no value.
engine::Tensor parameter(engine::Tape& tape, engine::Parameter& p);

}  // namespace tessera::ops
