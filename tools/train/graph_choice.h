// Whether a run's steps are CUDA graphs: [Note: steps as graphs] in trainer_graph.cc.
#pragma once

#include <string>

#include "tools/config/train_config.h"

namespace tessera::tools {

/// Steps of a run that come before those that are graphs: in the first kernels, products and memory
/// are found, the second shows that this was all.
inline constexpr std::int64_t kStepsBeforeGraph = 2;

/// What in the configuration keeps steps from being graphs; empty: nothing.
std::string graph_obstacle(const TrainConfig& config, int num_ranks, bool on_gpus);
/// What cuda.graph comes to. Throws InvalidArgument where graphs are asked for and cannot be.
bool uses_graphs(const TrainConfig& config, int num_ranks, bool on_gpus);
/// What cuda.graph comes to, as a line for the terminal; empty where nobody expects graphs.
std::string graph_line(const TrainConfig& config, int num_ranks, bool on_gpus);

}  // namespace tessera::tools
