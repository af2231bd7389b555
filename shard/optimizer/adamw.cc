#include "shard/optimizer/adamw.h"

#include <utility>

#include "engine/error.h"

namespace tessera::shard {

template class RuleOptimizer<AdamWRule>;

namespace {

using engine::require;

std::vector<ParameterGroup> groups_of(const AdamWOptions& options) {
  require(options.beta1 >= 0 && options.beta1 < 1, "[adamw] expected beta1 in [0, 1), got {}",
          options.beta1);
  require(options.beta2 >= 0 && options.beta2 < 1, "[adamw] expected beta2 in [0, 1), got {}",
          options.beta2);
  require(options.eps > 0, "[adamw] expected eps above 0, got {}", options.eps);
  std::vector<ParameterGroup> groups = {{.name = "matrices", .weight_decay = options.weight_decay},
                                        {.name = "vectors"}};
  groups.insert(groups.end(), options.groups.begin(), options.groups.end());
  for (const ParameterGroup& group : groups) {
    require(group.weight_decay >= 0, "[adamw] expected weight_decay of at least 0, got {} ({})",
            group.weight_decay, group.name);
  }
  return groups;
}

}  // namespace

AdamW::AdamW(Fsdp& fsdp, AdamWOptions options)
    : RuleOptimizer(
          fsdp, AdamWRule{.beta1 = options.beta1, .beta2 = options.beta2, .eps = options.eps},
          {"m", "v"}, groups_of(options),
          [](const engine::Parameter& p) -> std::size_t { return p.shape.rank() >= 2 ? 0 : 1; },
          options.updates) {}

}  // namespace tessera::shard
