// Inverted dropout (Srivastava et al., JMLR 2014) with a mask that is a function of the element's
// index, so that backward and recompute find it again and no rank layout changes it.
#pragma once

#include <cstdint>

#include "engine/philox.h"
#include "engine/tape.h"

namespace tessera::ops {

/// y[i] = x[i] / (1 - p) if random.uniform(first_index + i) >= p, else 0; any shape, f32 or bf16.
/// For p = 0 it is `x` itself. Keeps x, for its identity alone. Throws InvalidArgument unless 0 <=
/// p < 1.
engine::Tensor dropout(engine::Tape& tape, const engine::Tensor& x, float p,
                       engine::RandomStream random, std::uint64_t first_index);

}  // namespace tessera::ops
