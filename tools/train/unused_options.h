// Options that a run would take and not use: those that depend on the device or are defaults of
// every configuration that compare makes. TrainConfig::validate() refuses the others.
#pragma once

#include "tools/train/flags.h"
#include "tools/train/train_config.h"

namespace tessera::tools {

/// Throws InvalidArgument for one that was asked for on the command line.
void check_unused_options(const TrainConfig& config, const FlagSet& flags, bool on_gpus);

}  // namespace tessera::tools
