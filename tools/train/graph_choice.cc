#include "tools/train/graph_choice.h"

#include <fmt/format.h>

#include <utility>

#include "engine/error.h"

namespace tessera::tools {

std::string graph_obstacle(const TrainConfig& config, int num_ranks, bool on_gpus) {
  const StepConfig& train = config.train;
  const std::pair<bool, const char*> obstacles[] = {
      {!on_gpus, "the device is the CPU"},
      {num_ranks > 1, "there are several ranks"},
      {config.offload.any(), "the host takes part in what is offloaded"},
      {shard::make_hook(config.comm.options()) != nullptr, "comm.hook takes part on the host"},
      {train.overlap_optimizer != OverlapOptimizer::kNone, "train.overlap_optimizer is set"},
      {train.sums_losses(), "train.loss_mean=tokens adds up targets on the host"},
      {train.guards(), "train.spike_factor and train.verify_every read each step"},
      {train.check_gradients, "train.check_gradients reads each step"},
      {!config.log.trace.empty(), "log.trace times each launch"},
      {!config.log.probe.empty(), "log.probe looks into each step"},
      {!config.memory_budget.empty(), "a graph keeps memory that memory_budget does not see"},
  };
  for (const auto& [is_there, what] : obstacles) {
    if (is_there) return what;
  }
  return "";
}

bool uses_graphs(const TrainConfig& config, int num_ranks, bool on_gpus) {
  if (config.cuda.graph == GraphChoice::kOff) return false;
  const std::string obstacle = graph_obstacle(config, num_ranks, on_gpus);
  engine::require(obstacle.empty() || config.cuda.graph == GraphChoice::kAuto,
                  "[config] expected steps that can be CUDA graphs, got cuda.graph=on where {}",
                  obstacle);
  return obstacle.empty();
}

std::string graph_line(const TrainConfig& config, int num_ranks, bool on_gpus) {
  if (!on_gpus || config.cuda.graph == GraphChoice::kOff) return "";
  if (uses_graphs(config, num_ranks, on_gpus)) {
    return fmt::format("cuda graph: one launch a step, after the first {}", kStepsBeforeGraph);
  }
  return fmt::format("cuda graph: none, as {}", graph_obstacle(config, num_ranks, on_gpus));
}

}  // namespace tessera::tools
