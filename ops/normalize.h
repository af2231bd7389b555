// What layernorm and rmsnorm share: scale each row to unit variance, after removing its mean or
// not. Private to ops.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

enum class Norm { kLayer, kRms };

/// y = (x - mean) rstd w + bias over the last dimension C; for kRms mean is 0. x and y (..., C),
/// w (C) or null for ones, bias (C) or null; f32 or bf16, all alike.
/// rstd = 1 / sqrt(mean((x - mean)^2) + eps). Saves x, rstd and, for kLayer, mean (f32, one each
/// per row) if any gradient is wanted, and the ones. Throws InvalidArgument if shapes or dtypes do
/// not fit.
engine::Tensor normalize(engine::Tape& tape, Norm norm, const engine::Tensor& x,
                         engine::Parameter* w, engine::Parameter* bias, float eps);

/// Outputs of a residual addition and the norm after it.
struct NormOfSum {
  engine::Tensor sum;  ///< x + h
  engine::Tensor y;    ///< norm(sum)
};

/// Has the bits of add() and then normalize() of the sum, forward and backward, in one pass each:
/// backward takes the gradients of both outputs and gives x and h one tensor. x and h alike. Saves
/// the sum and what normalize() does but x, and x and h for their identity alone.
NormOfSum add_normalize(engine::Tape& tape, Norm norm, const engine::Tensor& x,
                        const engine::Tensor& h, engine::Parameter& w, engine::Parameter* bias,
                        float eps);

}  // namespace tessera::ops
