// What launchers and people have set for a trainer that does not heed it.
#pragma once

#include <string>
#include <vector>

#include "tools/machine/environment.h"
#include "tools/train/train_config.h"

namespace tessera::tools {

/// Lines for the terminal; none where nothing is amiss.
std::vector<std::string> launch_warnings(const Environment& environment, const TrainConfig& config);

}  // namespace tessera::tools
