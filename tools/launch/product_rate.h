// What the ranks of this machine multiply at most, measured in a moment: the peak that a training's
// own rate is compared with.
#pragma once

#include <chrono>

#include "comm/process_group.h"
#include "engine/dtype.h"

namespace tessera::tools {

/// Matrix products of a size that caches hold, operands of `dtype`, by all ranks at once as in a
/// training, three times for about `time`: floating point operations a second of all of them
/// together, the best of these, as other programs may take a part of each. CPU ranks alone.
/// Collective.
double product_flop_per_s(comm::ProcessGroup& world, engine::DType dtype,
                          std::chrono::milliseconds time);

}  // namespace tessera::tools
