// A pointwise op of one's own, for the CPU and for GPUs: squared ReLU (So et al., "Primer",
// arXiv:2109.08668).
#pragma once

#include "engine/tape.h"

/// max(x, 0)^2 and its slope; constexpr, so that a GPU's compiler takes them as well.
struct SquaredRelu {
  static constexpr float value(float x) { return x > 0 ? x * x : 0; }
  static constexpr float slope(float x) { return x > 0 ? 2 * x : 0; }
};

/// y = max(x, 0)^2, elementwise; any shape, f32 or bf16. Saves x.
tessera::engine::Tensor squared_relu(tessera::engine::Tape& tape, const tessera::engine::Tensor& x);
