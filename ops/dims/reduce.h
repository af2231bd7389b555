// Sums, means and maxima over one dimension, which the result lacks: reshape it, for free, where a
// dimension of 1 is wanted. Negative dimensions count from the end; sum.h adds up all elements.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = sum of x over dimension `dim`; f32 or bf16 -> y of the dtype of x. In f32, in an order that
/// depends on the length alone (ops/lanes.h), rounded once: the CPU and a GPU give equal bits.
/// Keeps x, for its identity alone. Throws InvalidArgument for another dtype, or if there is no
/// such dimension.
engine::Tensor sum(engine::Tape& tape, const engine::Tensor& x, int dim);

/// sum() / n, n being the length of the dimension, the sum being f32 until it is divided; NaN if n
/// is 0.
engine::Tensor mean(engine::Tape& tape, const engine::Tensor& x, int dim);

struct MaxOf {
  engine::Tensor y;
  engine::Tensor index;  ///< i32, in the shape of y: where the largest is
};

/// The largest of each, the first of equals; NaN is larger than all. The gradient goes to that one
/// element. Saves the indices. Throws as sum(), and if the dimension has no elements.
MaxOf max(engine::Tape& tape, const engine::Tensor& x, int dim);

}  // namespace tessera::ops
