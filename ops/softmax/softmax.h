// Softmax over the last dimension, and its logarithm.
//
// Sums of a row are made in the order of ops/block_sum.h, on the CPU and on a GPU, where exp is the
// GPU's approximation (ops/vector_math.h). A row depends on no other: NaN stays in its row. As in
// PyTorch a row that is -infinity everywhere, or +infinity anywhere, is NaN.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y[.., c] = exp(x[.., c] - max) / sum_j exp(x[.., j] - max), with max the largest of the row.
///   x (.., C) f32 or bf16, C at least 1 -> y like x. Computed in f32, with one rounding to x's
///   dtype. dx = y (dy - sum_j dy_j y_j). Saves y. Throws InvalidArgument for another dtype or
///   shape.
engine::Tensor softmax(engine::Tape& tape, const engine::Tensor& x);

/// y[.., c] = x[.., c] - max - log(sum_j exp(x[.., j] - max)), finite where softmax() is 0.
///   x (.., C) f32 or bf16, C at least 1 -> y like x. Computed in f32, with one rounding to x's
///   dtype. dx = dy - exp(y) sum_j dy_j, of the rounded y. Saves y. Throws InvalidArgument for
///   another dtype or shape.
engine::Tensor log_softmax(engine::Tape& tape, const engine::Tensor& x);

}  // namespace tessera::ops
