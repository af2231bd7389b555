// What a step does with whole parameters and gradients, for whoever looks at values.
#pragma once

#include <string_view>

namespace tessera::shard {

class Unit;

/// Told by the thread that launches; on a GPU values are read after the compute stream. Reads, and
/// launches nothing.
class StepListener {
 public:
  virtual ~StepListener() = default;
  /// The parameters of `unit` are whole in Parameter::value, until the call returns at least.
  /// `why`: "forward" or "backward". Once for each visit that computes with them.
  virtual void on_gathered(const Unit& unit, std::string_view why) = 0;
  /// The gradients of its trainable parameters are whole in Parameter::grad, zero where nothing was
  /// written, and are about to be reduced.
  virtual void on_gradient(const Unit& unit) = 0;
};

}  // namespace tessera::shard
