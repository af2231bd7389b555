#include "tools/config/replicas.h"

#include <fmt/format.h>

#include "shard/placement.h"

namespace tessera::tools {

std::string replicas_text(const TrainConfig& config, int num_ranks) {
  if (!shard::is_hybrid(config.parallel.strategy)) return "";
  return fmt::format("replicas of {}", config.fsdp_options(num_ranks).shard_ranks);
}

std::string replicas_warning(const TrainConfig& config, int num_ranks) {
  const std::string& strategy = config.parallel.strategy;
  if (num_ranks == 1 || config.parallel.shard_ranks > 0 || !shard::is_hybrid(strategy)) return "";
  if (config.fsdp_options(num_ranks).shard_ranks > 1) return "";
  const bool cuts_over_all = shard::Placement::preset(strategy).optimizer == shard::Place::kWorld;
  // One more than an odd number without divisors is even.
  return fmt::format(
      "warning: {} on {} ranks has replicas of 1 rank: {}; {} ranks or --parallel.shard_ranks make "
      "larger ones",
      strategy, num_ranks,
      cuts_over_all ? "only the optimizer's state is cut, as with zero1"
                    : "nothing is cut, as with ddp",
      num_ranks == 2 ? 4 : num_ranks + 1);
}

}  // namespace tessera::tools
