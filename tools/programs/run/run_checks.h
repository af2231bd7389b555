// What trainers, plan and compare check once it is known where the ranks of a run are.
#pragma once

#include "tools/cli/flags.h"
#include "tools/config/train_config.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {

/// Throws InvalidArgument for what no strategy could do on the device of these ranks, or what was
/// asked for and would have no effect there.
void check_device(const TrainConfig& config, const FlagSet& flags, const Ranks& ranks);
/// As check_device(), and of the strategy that was asked for.
void check_run(const TrainConfig& config, const FlagSet& flags, const Ranks& ranks);

}  // namespace tessera::tools
