// Softmax cross-entropy in which each class has a weight, such as more for those that are rare.
// What torch.nn.functional.cross_entropy(weight=...) gives is
//   reduction="mean"   weighted_cross_entropy(tape, logits, targets, class_weights)
//   reduction="none"   mul(tape, cross_entropy_rows(tape, logits, targets),
//                          target_weights(tape, class_weights, targets))
//   reduction="sum"    sum(tape, ...) of these
#pragma once

#include <cstdint>

#include "engine/tape.h"

namespace tessera::ops {

/// weights[i] = class_weights[targets[i]], and 0 for a target that is ignored.
///   class_weights (V) f32, targets (..) i32 -> weights f32 of the shape of targets, data.
///   Throws InvalidArgument if shapes or dtypes do not fit, for class weights whose gradient
///   somebody wants (stop_gradient() makes them data), and for a target outside [0, V) that is not
///   `ignore_index`, naming it, its position and V. A kernel cannot throw: on a GPU the weight of
///   such a target is NaN.
engine::Tensor target_weights(engine::Tape& tape, const engine::Tensor& class_weights,
                              const engine::Tensor& targets, std::int32_t ignore_index = -100);

/// loss = sum_i w[i] l[i] / sum_i w[i], with l of cross_entropy_rows() and w of target_weights();
/// 0, with gradients of 0, if these weights add up to 0, as where all targets are ignored.
///   logits (.., V) f32 or bf16, targets (..) i32, class_weights (V) f32 -> loss () f32. Saves what
///   cross_entropy_rows() does, one f32 a row, and one more. Losses of rows are rounded to f32
///   before they are weighed. Throws as both do.
engine::Tensor weighted_cross_entropy(engine::Tape& tape, const engine::Tensor& logits,
                                      const engine::Tensor& targets,
                                      const engine::Tensor& class_weights,
                                      std::int32_t ignore_index = -100);

}  // namespace tessera::ops
