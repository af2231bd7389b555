// What a person chooses about sharding. Switching strategy changes one value here, nothing else.
#pragma once

#include <cstdint>

#include "engine/dtype.h"
#include "engine/stream.h"
#include "shard/placement.h"

namespace tessera::shard {

/// Three roundings, named separately. The running sum over ranks and micro-steps is always f32, and
/// so are the master parameters.
struct Precision {
  engine::DType param = engine::DType::kF32;       ///< what is gathered and computed with
  engine::DType reduce = engine::DType::kF32;      ///< a gradient on the wire, 1 rank included
  engine::DType accumulate = engine::DType::kF32;  ///< what backward accumulates into

  friend bool operator==(const Precision&, const Precision&) = default;
};

/// When gradients are reduced under accumulation.
enum class Communicate {
  kEveryMicroStep,  ///< sharded gradients; the order of sums is that of one process
  kLastMicroStep,   ///< keeps whole gradients in between; an order of its own
};

struct FsdpOptions {
  Placement placement = {};
  /// How many units ahead are gathered; slots = prefetch + 1. At least 0.
  int prefetch = 1;
  /// Neighbouring blocks are packed into one unit until it has this many parameters.
  std::int64_t unit_min_numel = 0;
  Precision precision = {};
  Communicate communicate = Communicate::kEveryMicroStep;
  std::uint64_t seed = 1;  ///< of the initial parameters

  engine::LaunchListener* listener = nullptr;  ///< of the comm stream
  std::uint64_t delay_seed = 0;                ///< random delays on the comm stream (tests)
};

}  // namespace tessera::shard
