// What a hybrid's replicas come to, for the terminal.
#pragma once

#include <string>

#include "tools/config/train_config.h"

namespace tessera::tools {

/// "replicas of 2", "replicas of 2, one per process"; empty where the strategy has none.
std::string replicas_text(const TrainConfig& config, int num_ranks);
/// A line where replicas have one rank and nobody asked for that, as such ranks have no divisor to
/// cut by; empty elsewhere.
std::string replicas_warning(const TrainConfig& config, int num_ranks);

}  // namespace tessera::tools
