// Product of a tensor and a number.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = factor x, elementwise; any shape, f32 or bf16. Keeps x, for its identity alone. Throws
/// InvalidArgument for another dtype.
engine::Tensor scale(engine::Tape& tape, const engine::Tensor& x, float factor);

}  // namespace tessera::ops
