// Stochastic gradient descent with momentum.
#pragma once

#include <functional>
#include <vector>

#include "shard/optimizer/rule_optimizer.h"
#include "shard/optimizer/sgd_rule.h"

namespace tessera::shard {

// Compiled once, with this library's flags: a consumer's might contract products and sums.
extern template class RuleOptimizer<SgdRule>;

struct SgdOptions {
  double momentum = 0;
  std::vector<ParameterGroup> groups = {};  ///< besides "all", which has what none of them lists
  /// Which parameters it updates; null: all. See step_together.h.
  std::function<bool(const engine::Parameter&)> updates = {};
};

/// State: "velocity", if momentum is not 0.
class Sgd : public RuleOptimizer<SgdRule> {
 public:
  /// Throws InvalidArgument unless 0 <= momentum < 1, and for groups with a weight decay.
  Sgd(Fsdp& fsdp, SgdOptions options);
};

}  // namespace tessera::shard
