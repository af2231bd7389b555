// What launchers and people have set for a trainer that does not heed it.
#pragma once

#include <string>
#include <vector>

#include "tools/config/train_config.h"
#include "tools/launch/launcher.h"
#include "tools/machine/environment.h"

namespace tessera::tools {

/// Lines for the terminal; none where nothing is amiss.
std::vector<std::string> launch_warnings(const Environment& environment, const Launch& launch,
                                         const TrainConfig& config);

}  // namespace tessera::tools
