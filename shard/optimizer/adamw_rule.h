// AdamW for one element; see adamw.h.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace tessera::shard {

/// x^n for n >= 0, by multiplications alone: std::pow() rounds otherwise on a GPU than on its host,
/// and what both update must have the same bits.
constexpr double power(double x, std::int64_t n) {
  double result = 1;
  for (; n > 0; n /= 2, x *= x) {
    if (n % 2 == 1) result *= x;
  }
  return result;
}

struct AdamWRule {
  static constexpr std::size_t kNumStates = 2;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;

  struct Step {
    float keep, step_size, v_scale, beta1, beta2, eps;
  };
  constexpr Step prepare(double lr, double weight_decay, std::int64_t num_steps) const {
    return {.keep = static_cast<float>(1 - lr * weight_decay),
            .step_size = static_cast<float>(lr / (1 - power(beta1, num_steps))),
            .v_scale = static_cast<float>(1 / std::sqrt(1 - power(beta2, num_steps))),
            .beta1 = static_cast<float>(beta1),
            .beta2 = static_cast<float>(beta2),
            .eps = static_cast<float>(eps)};
  }
  /// m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; then decay and step.
  static constexpr void update(const Step& s, float grad, float& p, float* state) {
    float& m = state[0];
    float& v = state[1];
    m = s.beta1 * m + (1 - s.beta1) * grad;
    v = s.beta2 * v + (1 - s.beta2) * (grad * grad);
    p = p * s.keep - s.step_size * m / (std::sqrt(v) * s.v_scale + s.eps);
  }
};

}  // namespace tessera::shard
