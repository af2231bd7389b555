// Losses between two tensors of one shape and dtype, f32 or bf16 -> loss () f32. Terms are computed
// in f32, stored in the dtype of the tensors (so cast() what is bf16 where that is too coarse) and
// added up as ops::sum() does. cross_entropy.h has losses of classes.
//
// Each throws InvalidArgument if shapes or dtypes do not fit. Targets are data: for one whose
// gradient somebody wants, those that do not give it throw, and stop_gradient() makes it data.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// Mean over all elements of (x - target)^2. Gives the gradient of target, too. Saves both.
engine::Tensor mse(engine::Tape& tape, const engine::Tensor& x, const engine::Tensor& target);

/// Binary cross-entropy of sigmoid(logits): mean over all elements of
/// -target log(s) - (1 - target) log(1 - s) with s = sigmoid(logits), for targets from 0 to 1.
/// Saves both.
engine::Tensor bce_with_logits(engine::Tape& tape, const engine::Tensor& logits,
                               const engine::Tensor& target);

/// Kullback-Leibler divergence from distributions to those of a model: the mean over rows of
/// sum_v target (log(target) - log_probs), log_probs and target (.., V). A target of 0 adds 0.
/// Saves target.
engine::Tensor kl_divergence(engine::Tape& tape, const engine::Tensor& log_probs,
                             const engine::Tensor& target);

}  // namespace tessera::ops
