// v = momentum v + g; p -= lr v, for one element.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::shard {

/// v = momentum v + g; p -= lr v.
struct SgdRule {
  static constexpr std::size_t kNumStates = 1;
  double momentum = 0;

  struct Step {
    float lr, momentum;
  };
  constexpr Step prepare(double lr, double /*weight_decay*/, std::int64_t /*num_steps*/) const {
    return {static_cast<float>(lr), static_cast<float>(momentum)};
  }
  static constexpr void update(const Step& step, float grad, float& p, float* v) {
    v[0] = step.momentum * v[0] + grad;
    p -= step.lr * v[0];
  }
};

}  // namespace tessera::shard
