// Layer normalisation (Ba, Kiros and Hinton, arXiv:1607.06450).
#pragma once

#include "engine/tape.h"
#include "ops/normalize.h"

namespace tessera::ops {

/// y = (x - mean(x)) / sqrt(var(x) + eps) w + bias over the last dimension. x (..., C), w (C),
/// bias (C) or null; f32 or bf16, all alike. Saves x and, in f32, the mean and the reciprocal
/// standard deviation of each row. Throws InvalidArgument if shapes or dtypes do not fit.
inline engine::Tensor layernorm(engine::Tape& tape, const engine::Tensor& x, engine::Parameter& w,
                                engine::Parameter* bias, float eps = 1e-5f) {
  return normalize(tape, Norm::kLayer, x, &w, bias, eps);
}

/// y = (x - mean(x)) / sqrt(var(x) + eps) over the last dimension, without parameters. x (..., C),
/// f32 or bf16. Saves what layernorm() with parameters saves, and C ones. Throws InvalidArgument
/// for another dtype, or for x of rank 0.
inline engine::Tensor layernorm(engine::Tape& tape, const engine::Tensor& x, float eps = 1e-5f) {
  return normalize(tape, Norm::kLayer, x, nullptr, nullptr, eps);
}

/// sum = x + h and y = layernorm(sum): the same bits as add() and layernorm(), in one pass each
/// way. x and h (..., C) alike. Saves the sum in place of x. Throws as layernorm(), and if x and h
/// differ.
inline NormOfSum add_layernorm(engine::Tape& tape, const engine::Tensor& x, const engine::Tensor& h,
                               engine::Parameter& w, engine::Parameter* bias, float eps = 1e-5f) {
  return add_normalize(tape, Norm::kLayer, x, h, w, bias, eps);
}

}  // namespace tessera::ops
