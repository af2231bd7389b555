// Gated unit of Llama's MLP (Shazeer, arXiv:2002.05202): silu(gate) * up.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y = gate / (1 + e^-gate) * up, elementwise; same shape and dtype, f32 or bf16. Saves gate,
/// and up if somebody wants the gradient of gate. Throws InvalidArgument if shapes or dtypes
/// differ.
engine::Tensor swiglu(engine::Tape& tape, const engine::Tensor& gate, const engine::Tensor& up);

}  // namespace tessera::ops
