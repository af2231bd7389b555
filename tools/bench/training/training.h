// Whole training steps on random tokens: the rows that steps and profile time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/dtype.h"
#include "engine/gemm/gemm_cuda.h"
#include "engine/memory.h"
#include "shard/options.h"
#include "tools/bench/training/launches.h"
#include "tools/models/family.h"

namespace tessera::tools {

/// One model, batch, strategy and device. AdamW, f32 gradients.
struct TrainingRow {
  ModelConfig model;
  std::int64_t batch = 4;  ///< of a rank
  int ranks = 1;
  std::string strategy = "zero3";
  engine::DType param = engine::DType::kF32;
  bool on_gpu = false;  ///< GPU 0, one rank
  int prefetch = 1;     ///< as in FsdpOptions, like the next
  shard::BackwardPrefetch backward_prefetch = shard::BackwardPrefetch::kPre;
  shard::OffloadOptions offload = {};
  bool updates_in_backward = false;
  bool is_graph = false;  ///< on a GPU: timed steps are CUDA graphs, which nobody listens to

  std::string name() const;
};

/// Of the family whose speed is measured.
ModelConfig bench_model(std::int64_t layers, std::int64_t heads, std::int64_t dim, std::int64_t seq,
                        std::int64_t vocab = 256);

const std::vector<TrainingRow>& training_rows();
/// The smallest of measured_presets(), a sequence a rank: seconds a step.
const std::vector<TrainingRow>& preset_rows();
/// SmolLM2-135M, a sequence of 512 tokens a rank: seconds a step.
const std::vector<TrainingRow>& smollm2_rows();
/// The default model and larger ones, for ranks that are processes.
const std::vector<TrainingRow>& process_rows();
/// What prefetch, offload and hooks vary.
TrainingRow prefetch_row();
TrainingRow offload_row();
TrainingRow hooks_row();

/// What rank 0 measured, a value for each timed step. On a GPU nothing inside a step is timed:
/// step_ms is from the end of one step to the end of the next, which the host launches meanwhile.
struct TrainingTimes {
  std::vector<double> step_ms;
  engine::MemoryStats memory;       ///< after the last step
  engine::MemoryStats host_memory;  ///< of what is offloaded
  std::vector<double> forward_ms, backward_ms;
  std::vector<double> finish_ms;        ///< last reductions, norm of the gradient
  std::vector<double> optimizer_ms;     ///< and the copies in the parameter dtype
  std::vector<double> exposed_comm_ms;  ///< compute waiting for collectives, within the others
};

inline constexpr std::int64_t kWarmupSteps = 3;

/// What a rank's model is wrapped with instead of the group itself.
using WrapGroup = std::function<std::unique_ptr<comm::ProcessGroup>(comm::ProcessGroup&)>;

/// Builds the model and runs kWarmupSteps that do not count and `num_steps` that do. `log`, if not
/// null, hears what rank 0 launches in those. `wrap` may be null. `at_ends`, if not null, is called
/// by rank 0 before the first that counts and after the last.
TrainingTimes run_training(const TrainingRow& row, std::int64_t num_steps, LaunchLog* log = nullptr,
                           const WrapGroup& wrap = nullptr,
                           const std::function<void()>& at_ends = nullptr);

/// One rank's part of run_training(), whose listeners are this rank's, in a world of row.ranks.
TrainingTimes train_rank(comm::ProcessGroup& world, const TrainingRow& row, std::int64_t num_steps,
                         LaunchLog* log = nullptr, const std::function<void()>& at_ends = nullptr);

/// The matrix products of a step on a GPU, each once; needs none. Of a build with CUDA.
std::vector<engine::DeviceProduct> gemms_of(const TrainingRow& row);

}  // namespace tessera::tools
