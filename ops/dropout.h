// Inverted dropout (Srivastava et al., JMLR 2014) with a mask that is a function of the element's
// index, so that backward and recompute find it again and no rank layout changes it.
#pragma once

#include <cstdint>

#include "engine/philox.h"
#include "engine/tape.h"

namespace tessera::ops {

/// What is added to a first index when a kernel runs: `count` times `numel`.
struct IndexOffset {
  engine::Tensor count = {};  ///< (1) i64 on a GPU, which outlives the use; undefined: 0
  std::int64_t numel = 0;
};

/// y[i] = x[i] / (1 - p) if random.uniform(first_index + i) >= p, else 0; any shape, f32 or bf16.
/// For p = 0 it is `x` itself. Keeps x, for its identity alone. `offset`: for a step that is
/// captured, added to first_index. Throws InvalidArgument unless 0 <= p < 1, and for an offset on
/// the CPU.
engine::Tensor dropout(engine::Tape& tape, const engine::Tensor& x, float p,
                       engine::RandomStream random, std::uint64_t first_index,
                       const IndexOffset& offset = {});

}  // namespace tessera::ops
