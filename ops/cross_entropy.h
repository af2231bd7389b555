// Softmax cross-entropy, from logits or fused with the matrix product that makes them; the mean of
// all rows, their sum, or the loss of each.
//
// A mean is over the targets that are not ignored, 0 if all are. Row losses are summed in double,
// in an order that depends on their number alone. A target outside [0, V) that is not
// `ignore_index` throws InvalidArgument naming it, its position and V; on a GPU, where nobody waits
// for the kernel that sees it, the loss and the gradients of its row become NaN.
#pragma once

#include <cstdint>

#include "engine/tape.h"

namespace tessera::ops {

/// loss = mean_i(log(sum_v exp(logits[i, v])) - logits[i, targets[i]]).
///   logits (.., V) f32 or bf16, targets (..) i32 -> loss () f32. Saves logits, targets and two f32
///   a row.
///   Throws InvalidArgument if shapes or dtypes do not fit.
engine::Tensor cross_entropy(engine::Tape& tape, const engine::Tensor& logits,
                             const engine::Tensor& targets, std::int32_t ignore_index = -100);

/// losses[i] = log(sum_v exp(logits[i, v])) - logits[i, targets[i]], and 0 for a row whose target
/// is ignored, which has no gradient: for who weights, masks and adds up rows in another way.
///   logits (.., V) f32 or bf16, targets (..) i32 -> losses f32 of the shape of targets. Saves
///   logits, targets and two f32 a row.
///   Throws InvalidArgument if shapes or dtypes do not fit.
engine::Tensor cross_entropy_rows(engine::Tape& tape, const engine::Tensor& logits,
                                  const engine::Tensor& targets, std::int32_t ignore_index = -100);

struct LinearCrossEntropyOptions {
  std::int32_t ignore_index = -100;
  bool is_sum = false;  ///< of the losses of all rows, for a mean over more of them than x has
  std::int64_t chunk_rows = 0;  ///< rows whose logits live at one time; 0: chosen by V
  /// Forward saves what backward needs of all logits if they are at most this many. Otherwise
  /// backward computes the logits of each chunk again on the CPU: half as much forward work more,
  /// and equal bits. On a GPU forward makes the gradients of x and w, which backward scales: no
  /// more work, and dx rounded once more. Negative: 2^26 on the CPU, 2^32 on a GPU.
  std::int64_t max_saved_numel = -1;
};

/// cross_entropy(x w^T), or its sum over rows, a chunk of rows at a time: full logits need not
/// live.
///   x (.., C) f32 or bf16, w (V, C) f32 or bf16, targets (..) i32 -> loss () f32. Logits are f32,
///   on a GPU of the dtype of x.
///   The gradient of w is summed chunk by chunk in its view, or in f32 workspace (V, C) if the view
///   is bf16. Saves w, targets, two f32 per row and, within `max_saved_numel`, (.., V) f32 on the
///   CPU and of the dtype of x on a GPU; and x, unless w is frozen and these logits are saved.
///   Beyond it a GPU saves in their place the gradients of x, of its dtype, and of w, f32.
///   A bf16 w is widened once a pass on the CPU.
///   On a GPU a bf16 x rounds twice. A logit is off by at most 2^-8 of itself: so with L the
///   largest absolute value of a row's logits the row's loss is off by at most 2^-7 L, without a
///   bias that rows would share, and softmax by a factor of at most exp(2^-7 L). And softmax -
///   onehot is off by 2^-8 of itself, before it is multiplied with w and x. x and w should be of
///   one dtype there. If they are bf16 and V is no multiple of 8, both passes take workspace for w,
///   and backward for an f32 dw. Throws InvalidArgument if shapes or dtypes do not fit.
engine::Tensor linear_cross_entropy(engine::Tape& tape, const engine::Tensor& x,
                                    engine::Parameter& w, const engine::Tensor& targets,
                                    const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::ops
