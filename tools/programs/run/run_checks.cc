#include "tools/programs/run/run_checks.h"

#include <string_view>

#include "engine/error.h"
#include "tools/config/unused_options.h"
#include "tools/launch/launcher.h"
#include "tools/launch/processes.h"
#include "tools/machine/environment.h"
#include "tools/train/graph_choice.h"

namespace tessera::tools {
namespace {

// What is said of how processes find and reach each other means nothing to one alone.
void check_launch_options(const ParallelConfig& config, const Ranks& ranks) {
  if (ranks.launch.by != LauncherChoice::kThreads) return;
  const auto require_unused = [](bool is_used, std::string_view option, std::string_view value) {
    engine::require(
        !is_used,
        "[config] expected {} where a launcher has started this process, got {} without "
        "one",
        option, value);
  };
  const bool asks =
      config.launcher != LauncherChoice::kAuto && config.launcher != LauncherChoice::kThreads;
  require_unused(asks, "parallel.launcher", name_of(config.launcher));
  require_unused(config.transport != TransportChoice::kAuto, "parallel.transport",
                 name_of(config.transport));
  require_unused(!config.address.empty(), "parallel.address", config.address);
  require_unused(!config.interface.empty(), "parallel.interface", config.interface);
  require_unused(config.insecure, "parallel.insecure", "true");
}

}  // namespace

void check_device(const TrainConfig& config, const FlagSet& flags, const Ranks& ranks) {
  const bool on_gpus = ranks.num_gpus > 0;
  check_unused_on_cpu(flags, on_gpus);
  check_launch_options(config.parallel, ranks);
  engine::require(!ranks.nccl || environment()["NCCL_COMM_ID"].empty(),
                  "[config] expected NCCL_COMM_ID unset, got it: a run has several communicators "
                  "of NCCL, and it gives all of them one meeting place");
  static_cast<void>(uses_graphs(config, ranks.size, on_gpus));  // or throws
}

void check_run(const TrainConfig& config, const FlagSet& flags, const Ranks& ranks) {
  check_device(config, flags, ranks);
  check_unused_by_strategy(config, flags);
  static_cast<void>(config.fsdp_options(ranks.size));  // or throws
}

}  // namespace tessera::tools
