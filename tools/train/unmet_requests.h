// What a run was asked for and, as far as is known before its first step, will not come to.
#pragma once

#include <string>
#include <vector>

#include "tools/config/train_config.h"
#include "tools/train/run_checkpoints.h"

namespace tessera::tools {

/// A line each, of a run with `config` that goes on from `start`; none if all will be as it was
/// asked for.
std::vector<std::string> unmet_requests(const TrainConfig& config, const TrainPosition& start);

}  // namespace tessera::tools
