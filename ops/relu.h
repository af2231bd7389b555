// Rectified linear unit.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = max(x, 0), elementwise; any shape, f32 or bf16; NaN stays NaN. The slope at 0 is 0. Saves x.
/// Throws InvalidArgument for another dtype.
engine::Tensor relu(engine::Tape& tape, const engine::Tensor& x);

}  // namespace tessera::ops
