// Gaussian error linear unit (Hendrycks and Gimpel, arXiv:1606.08415): x P(X <= x), X ~ N(0, 1).
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

enum class GeluKind {
  kTanh,  ///< x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2: GPT-2's ("gelu_new")
  kErf,   ///< x (1 + erf(x / sqrt 2)) / 2: exact
};

/// y = gelu(x), elementwise; any shape, f32 or bf16. Saves x. Throws InvalidArgument for another
/// dtype.
engine::Tensor gelu(engine::Tape& tape, const engine::Tensor& x, GeluKind kind = GeluKind::kTanh);

}  // namespace tessera::ops
