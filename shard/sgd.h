// Stochastic gradient descent with momentum.
#pragma once

#include <vector>

#include "shard/rule_optimizer.h"

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

struct SgdOptions {
  double momentum = 0;
  std::vector<ParameterGroup> groups = {};  ///< beside "all", for what none of them lists
};

/// State: "velocity", if momentum is not 0.
class Sgd : public RuleOptimizer<SgdRule> {
 public:
  /// Throws InvalidArgument unless 0 <= momentum < 1, and for groups with a weight decay.
  Sgd(Fsdp& fsdp, SgdOptions options);
};

}  // namespace tessera::shard
