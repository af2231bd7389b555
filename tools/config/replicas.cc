#include "tools/config/replicas.h"

#include <fmt/format.h>

#include "shard/placement.h"

namespace tessera::tools {

std::string replicas_text(const TrainConfig& config, int num_ranks) {
  const ParallelConfig& p = config.parallel;
  if (!p.preset().is_hybrid()) return "";
  const bool has_place = p.shard_ranks == 0 && p.replica_ranks > 0;
  return fmt::format("replicas of {}{}", config.fsdp_options(num_ranks).placement.shard_ranks,
                     has_place ? ", one per " + p.replica_place : "");
}

std::string replicas_warning(const TrainConfig& config, int num_ranks) {
  const shard::Placement preset = config.parallel.preset();
  if (num_ranks == 1 || config.parallel.shard_ranks > 0 || !preset.is_hybrid()) return "";
  if (config.parallel.placement(num_ranks).shard_ranks > 1) return "";
  // One more than an odd number without divisors is even.
  return fmt::format(
      "warning: {} on {} ranks has replicas of 1 rank: {}; {} ranks or --parallel.shard_ranks make "
      "larger ones",
      config.parallel.strategy, num_ranks,
      preset.optimizer == shard::Place::kWorld ? "only the optimizer's state is cut, as with zero1"
                                               : "nothing is cut, as with ddp",
      num_ranks == 2 ? 4 : num_ranks + 1);
}

}  // namespace tessera::tools
