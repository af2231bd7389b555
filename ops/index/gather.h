// Elements and rows of an activation, chosen by number.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y[..] = x[.., index[..]]: one element of each row, as the log-probability of the token that was
/// taken.
///   x (.., C) f32 or bf16, index (..) i32 -> y (..) like x. Backward gives dy to the elements that
///   were chosen, and 0 to the others. Saves index.
///   Throws InvalidArgument if shapes or dtypes do not fit, and for an index outside [0, C), naming
///   it, its position and C. A kernel cannot throw: on a GPU the element of such an index is NaN
///   and it has no gradient.
engine::Tensor gather(engine::Tape& tape, const engine::Tensor& x, const engine::Tensor& index);

/// y[.., :] = x[index[..], :]; a row may be chosen several times.
///   x (N, C) f32 or bf16, index (..) i32, up to 4 dimensions -> y (.., C) like x. Backward adds
///   the rows of dy in the order of index, in f32 with one rounding per element; rows of x that are
///   not chosen get 0. Saves index. ops::embedding() is this for a parameter. Throws
///   InvalidArgument if shapes or dtypes do not fit, and for an index outside [0, N), naming it,
///   its position and N. A kernel cannot throw: on a GPU the row of such an index is NaN and it has
///   no gradient.
engine::Tensor rows(engine::Tape& tape, const engine::Tensor& x, const engine::Tensor& index);

}  // namespace tessera::ops
