// Functions of one number, element by element; relu.h, gelu.h and scale.h have three more.
//
// Of each: x of any shape, f32 or bf16, computed in f32 -> y like x, within a few units in the last
// place of f32; on a GPU exp, and with it what is made of it, has the error of the GPU's
// approximation, 2 + 1.2 |x| units. Saves x. NaN stays NaN. Throws InvalidArgument for another
// dtype.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

engine::Tensor tanh(engine::Tape& tape, const engine::Tensor& x);
/// y = 1 / (1 + e^-x).
engine::Tensor sigmoid(engine::Tape& tape, const engine::Tensor& x);
/// y = x / (1 + e^-x).
engine::Tensor silu(engine::Tape& tape, const engine::Tensor& x);
/// y = e^x; 0 where that is below 2^-126.
engine::Tensor exp(engine::Tape& tape, const engine::Tensor& x);
/// The natural logarithm: -infinity at 0, NaN below.
engine::Tensor log(engine::Tape& tape, const engine::Tensor& x);
/// y = log(1 + e^x).
engine::Tensor softplus(engine::Tape& tape, const engine::Tensor& x);
/// y = min(max(x, low), high). The slope is 1 from `low` to `high`, both included, and 0 elsewhere.
/// Throws InvalidArgument, too, unless low <= high.
engine::Tensor clamp(engine::Tape& tape, const engine::Tensor& x, float low, float high);

}  // namespace tessera::ops
