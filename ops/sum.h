// Sum of all elements.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = sum_i x[i]; x of any shape, f32 or bf16 -> y () f32. Summed in double and rounded once, in
/// an order that depends on the size alone: the CPU and a GPU give the same bits. Keeps x, for its
/// identity alone. Throws InvalidArgument for another dtype.
engine::Tensor sum(engine::Tape& tape, const engine::Tensor& x);

}  // namespace tessera::ops
