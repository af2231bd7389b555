#include "tools/programs/run_checks.h"

#include "engine/error.h"
#include "tools/config/unused_options.h"
#include "tools/train/graph_choice.h"

namespace tessera::tools {

void check_device(const TrainConfig& config, const FlagSet& flags, const Ranks& ranks) {
  const bool on_gpus = ranks.num_gpus > 0;
  check_unused_on_cpu(flags, on_gpus);
  static_cast<void>(uses_graphs(config, ranks.size, on_gpus));  // or throws
}

void check_run(const TrainConfig& config, const FlagSet& flags, const Ranks& ranks) {
  check_device(config, flags, ranks);
  check_unused_by_strategy(config, flags);
  static_cast<void>(config.fsdp_options(ranks.size));  // or throws
  engine::require(!ranks.are_processes() || config.log.probe.empty(),
                  "[config] expected log.probe with one process, which sees all ranks, got {} "
                  "processes",
                  ranks.launch.num_processes);
}

}  // namespace tessera::tools
