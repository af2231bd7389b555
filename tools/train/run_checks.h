// What trainers and plan both check once it is known where the ranks of a run are.
#pragma once

#include "tools/train/flags.h"
#include "tools/train/ranks.h"
#include "tools/train/train_config.h"

namespace tessera::tools {

/// Throws InvalidArgument for what these ranks cannot do, or what was asked for and would have no
/// effect there.
void check_run(const TrainConfig& config, const FlagSet& flags, const Ranks& ranks);

}  // namespace tessera::tools
