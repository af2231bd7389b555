// Parts of a tensor along one dimension, and tensors laid side by side. Negative dimensions count
// from the end.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/tape.h"

namespace tessera::ops {

/// y = x[.., begin : begin + count, ..] in dimension `dim`. x of any shape, f32 or bf16 -> y with
/// `count` in that dimension, in memory of its own. The gradient is 0 elsewhere. Keeps x, for its
/// identity alone. Throws InvalidArgument if the part is not inside, or for another dtype.
engine::Tensor slice(engine::Tape& tape, const engine::Tensor& x, int dim, std::int64_t begin,
                     std::int64_t count);

/// Consecutive parts of x with `counts` in dimension `dim`, which add up to all of it: as several
/// slices, but their gradients are written in one place. Throws InvalidArgument if they do not add
/// up, or for another dtype than f32 and bf16.
std::vector<engine::Tensor> split(engine::Tape& tape, const engine::Tensor& x, int dim,
                                  const std::vector<std::int64_t>& counts);

/// The tensors one after the other in dimension `dim`, in which alone they may differ; one dtype,
/// f32 or bf16; a tensor may be there twice. Keeps them, for their identity alone. Throws
/// InvalidArgument if there is none, or if shapes or dtypes do not fit.
engine::Tensor concat(engine::Tape& tape, const std::vector<engine::Tensor>& xs, int dim);

}  // namespace tessera::ops
