// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, with bias
// correction.
//
//   AdamW optimizer(fsdp, {});  // beta1 0.9, beta2 0.95, eps 1e-8, weight decay 0.1 of matrices
//
// These are the values that language models are trained with. PyTorch's AdamW has beta2 0.999 and
// weight decay 0.01, of vectors as well.
#pragma once

#include <functional>
#include <vector>

#include "shard/optimizer/adamw_rule.h"
#include "shard/optimizer/rule_optimizer.h"

namespace tessera::shard {

// Compiled once, with this library's flags: a consumer's might contract products and sums.
extern template class RuleOptimizer<AdamWRule>;

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  ///< of group "matrices"; "vectors" have none
  /// Beside "matrices" (two or more dimensions) and "vectors", for what none of them lists.
  std::vector<ParameterGroup> groups = {};
  /// Which parameters it updates; null: all. See step_together.h.
  std::function<bool(const engine::Parameter&)> updates = {};
};

/// States: "m" and "v".
class AdamW : public RuleOptimizer<AdamWRule> {
 public:
  /// Throws InvalidArgument unless 0 <= beta < 1, eps > 0, weight_decay >= 0.
  AdamW(Fsdp& fsdp, AdamWOptions options);
};

}  // namespace tessera::shard
