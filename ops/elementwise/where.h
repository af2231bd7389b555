// A choice between two tensors, element by element.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y[i] = a[i] where condition[i] is not 0, else b[i]; three tensors of one shape and dtype, f32 or
/// bf16. What is not chosen has no effect on y and a gradient of 0, even if it is NaN. `condition`
/// has no gradient. Saves it. Throws InvalidArgument if shapes or dtypes differ.
engine::Tensor where(engine::Tape& tape, const engine::Tensor& condition, const engine::Tensor& a,
                     const engine::Tensor& b);

}  // namespace tessera::ops
