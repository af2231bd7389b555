// Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467).
#pragma once

#include "engine/tape.h"
#include "ops/normalize.h"

namespace tessera::ops {

/// y = x / sqrt(mean(x^2) + eps) w over the last dimension. x (..., C), w (C); f32 or bf16, alike.
/// Saves x and, in f32, the reciprocal root of each row. Throws InvalidArgument if shapes or dtypes
/// do not fit.
inline engine::Tensor rmsnorm(engine::Tape& tape, const engine::Tensor& x, engine::Parameter& w,
                              float eps = 1e-5f) {
  return normalize(tape, Norm::kRms, x, &w, nullptr, eps);
}

/// y = x / sqrt(mean(x^2) + eps) over the last dimension, without parameters. x (..., C), f32 or
/// bf16. Saves what rmsnorm() with parameters saves, and C ones. Throws InvalidArgument for another
/// dtype, or for x of rank 0.
inline engine::Tensor rmsnorm(engine::Tape& tape, const engine::Tensor& x, float eps = 1e-5f) {
  return normalize(tape, Norm::kRms, x, nullptr, nullptr, eps);
}

/// sum = x + h and y = rmsnorm(sum): the same bits as add() and rmsnorm(), in one pass each way.
/// x and h (..., C) alike. Saves the sum in place of x. Throws as rmsnorm(), and if x and h differ.
inline NormOfSum add_rmsnorm(engine::Tape& tape, const engine::Tensor& x, const engine::Tensor& h,
                             engine::Parameter& w, float eps = 1e-5f) {
  return add_normalize(tape, Norm::kRms, x, h, w, nullptr, eps);
}

}  // namespace tessera::ops
