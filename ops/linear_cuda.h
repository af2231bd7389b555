// GPU side of ops::linear. Private to ops.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// dst[j] = the sum of column j of x (rows, cols), or += it. x and dst f32 or bf16, any mix; sums
/// are f32 and rounded once. The order of additions is a function of the shape alone.
void column_sums_cuda(const engine::Stream& stream, const engine::Memory& memory,
                      const engine::GradTarget& dst, const engine::Tensor& x);

}  // namespace tessera::ops
