// Dimensions in another order.
#pragma once

#include <vector>

#include "engine/tape.h"

namespace tessera::ops {

/// Dimension k of y is dimension dims[k] of x: permute(x, {0, 2, 1, 3}) of (B, T, H, D) is
/// (B, H, T, D), in memory of its own. f32 or bf16. Negative dimensions count from the end. Keeps
/// x, for its identity alone. Throws InvalidArgument unless `dims` has each dimension once, or for
/// another dtype.
engine::Tensor permute(engine::Tape& tape, const engine::Tensor& x, const std::vector<int>& dims);

/// permute() that exchanges two dimensions.
engine::Tensor transpose(engine::Tape& tape, const engine::Tensor& x, int a, int b);

}  // namespace tessera::ops
