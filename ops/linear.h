// Affine map of the last dimension.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// How the weight of a linear layer is stored.
enum class WeightLayout {
  kInOut,  ///< (I, O): GPT-2's
  kOutIn,  ///< (O, I): PyTorch's, and an embedding table used as the last layer
};

/// y = x W + b. x (..., I), w (I, O) or (O, I), bias (O) or null; y (..., O). f32 or bf16, all
/// alike; sums are f32 and rounded once, on a GPU as engine/gemm/gemm_cuda.h says. Saves x if w is
/// trainable. On a GPU the gradient of the bias takes the sums that whoever writes the gradient of
/// y may leave; see [Note: sums left beside gradients] in engine/tape.cc. Throws InvalidArgument if
/// shapes or dtypes do not fit.
engine::Tensor linear(engine::Tape& tape, const engine::Tensor& x, engine::Parameter& w,
                      engine::Parameter* bias, WeightLayout layout = WeightLayout::kInOut);

/// gelu(x W + b), tanh, with the tape and, but for what follows, the bits of gelu() of linear(); b
/// not null. On a GPU both are one product where a choice by time has found that to be faster
/// (engine/gemm/gemm_algorithms.h); GELU is then of the sum before it is rounded, so that in bf16 y
/// differs by up to 2^-8 |x W + b| besides its own rounding. Saves what the two do.
engine::Tensor linear_gelu(engine::Tape& tape, const engine::Tensor& x, engine::Parameter& w,
                           engine::Parameter& bias, WeightLayout layout = WeightLayout::kInOut);

/// linear(linear_gelu(x, w_in, b_in), w_out, b_out): the two layers around GELU whose output nobody
/// else sees. y (..., O). The tape and, but for what follows, the bits of the two. On a GPU no
/// gradient of GELU's output is stored: it is multiplied with the slope of GELU where the gradient
/// of h = x W_in + b_in goes. Both are one product where a choice by time has found that to be
/// faster, as in linear_gelu() and in bf16 alone; the slope is then of the product before it is
/// rounded, so that the gradient of h differs by up to 2^-7 |dy W_out^T| besides its own rounding.
/// Use linear_gelu() where GELU's output is used twice. Saves what the two do.
engine::Tensor gelu_mlp(engine::Tape& tape, const engine::Tensor& x, engine::Parameter& w_in,
                        engine::Parameter& b_in, engine::Parameter& w_out, engine::Parameter* b_out,
                        WeightLayout layout = WeightLayout::kInOut);

}  // namespace tessera::ops
