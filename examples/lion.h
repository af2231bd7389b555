// An optimizer of one's own: Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms",
// 2023).
#pragma once

#include <cstddef>
#include <cstdint>

struct Lion {
  static constexpr std::size_t kNumStates = 1;
  double beta1 = 0.9, beta2 = 0.99;

  struct Step {
    float lr, keep, beta1, beta2;
  };
  constexpr Step prepare(double lr, double weight_decay, std::int64_t /*num_steps*/) const {
    return {float(lr), float(1 - lr * weight_decay), float(beta1), float(beta2)};
  }
  static constexpr void update(const Step& s, float grad, float& p, float* m) {
    const float direction = s.beta1 * m[0] + (1 - s.beta1) * grad;
    p = p * s.keep - s.lr * (direction > 0 ? 1.0f : direction < 0 ? -1.0f : 0.0f);
    m[0] = s.beta2 * m[0] + (1 - s.beta2) * grad;
  }
};
