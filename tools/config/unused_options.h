// Options that a run would take and not use: those that depend on the device, or on the strategy
// where compare gives them to all of several. TrainConfig::validate() refuses the others.
#pragma once

#include "tools/cli/flags.h"
#include "tools/config/train_config.h"

namespace tessera::tools {

/// Throws InvalidArgument for what was asked for on the command line and only GPUs have a use for.
void check_unused_on_cpu(const FlagSet& flags, bool on_gpus);
/// Throws InvalidArgument for what was asked for there and parallel.strategy has no use for.
void check_unused_by_strategy(const TrainConfig& config, const FlagSet& flags);

}  // namespace tessera::tools
