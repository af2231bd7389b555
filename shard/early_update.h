// An optimizer's update of each unit while backward goes on; see Fsdp::take_gradients_early().
#pragma once

#include <functional>

#include "engine/stream.h"

namespace tessera::shard {

class Optimizer;
class Unit;

/// When an update during backward has updated parameters gathered that are whole on every rank, or
/// in every replica, and updated in parts (zero1, zero2 and hybrids).
enum class UpdateGathers {
  kInterleaved,  ///< of each unit at once, between what backward sends; with
                 ///< OffloadOptions::optimizer after the norm, as others would wait for the host
  kContiguous,   ///< of all units after the last reduction
};

/// An update during backward: what it calls in the order of its members.
struct EarlyUpdate {
  const Optimizer* owner = nullptr;  ///< whose update it is
  UpdateGathers gathers;
  /// Before the first unit, in the last backward of the step or in finish_step().
  std::function<void()> begin;
  /// With each unit, once its sums are final, and a stream that has waited for them.
  std::function<void(Unit& unit, const engine::Stream& stream)> update_unit;
  std::function<void()> end;  ///< in finish_step()
};

}  // namespace tessera::shard
