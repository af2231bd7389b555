#include "shard/optimizer/sgd.h"

#include <utility>

#include "engine/error.h"

namespace tessera::shard {

template class RuleOptimizer<SgdRule>;

namespace {

std::vector<ParameterGroup> groups_of(const SgdOptions& options) {
  engine::require(options.momentum >= 0 && options.momentum < 1,
                  "[sgd] expected momentum in [0, 1), got {}", options.momentum);
  std::vector<ParameterGroup> groups = {{.name = "all"}};
  for (const ParameterGroup& group : options.groups) {
    engine::require(group.weight_decay == 0, "[sgd] expected no weight decay, got {} (group '{}')",
                    group.weight_decay, group.name);
    groups.push_back(group);
  }
  return groups;
}

}  // namespace

Sgd::Sgd(Fsdp& fsdp, SgdOptions options)
    : RuleOptimizer(
          fsdp, SgdRule{.momentum = options.momentum},
          options.momentum != 0 ? std::vector<std::string>{"velocity"} : std::vector<std::string>{},
          groups_of(options), /*default_group=*/{}, options.updates) {}

}  // namespace tessera::shard
