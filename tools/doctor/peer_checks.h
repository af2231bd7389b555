// The connections between processes that a launcher has started together.
#pragma once

#include "tools/config/train_config.h"
#include "tools/doctor/check.h"
#include "tools/launch/launcher.h"

namespace tessera::tools {

/// Whether Gloo is here, and at which address the processes of other hosts would reach this one.
Check check_gloo(const ParallelConfig& config);

/// Connects the processes of `launch`, of which there are several, as a training would. In process
/// 0, which tries each of the others for less than a second, a line that says how they are
/// connected, and one for each other process: its host, its latency and its bandwidth; in the
/// others none. kFail for what keeps them apart and for bytes that come back otherwise; kWarn for
/// one with less than a quarter of the best bandwidth. Collective.
Checks check_peers(const TrainConfig& config, const Launch& launch);

}  // namespace tessera::tools
