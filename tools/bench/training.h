// Whole training steps on random tokens: the rows that steps and profile time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/dtype.h"
#include "engine/memory.h"
#include "tools/bench/launches.h"
#include "tools/models/gpt.h"

namespace tessera::tools {

/// One model, batch, strategy and device. AdamW, f32 gradients.
struct TrainingRow {
  GptConfig model;
  std::int64_t batch = 4;  ///< of a rank
  int ranks = 1;
  std::string strategy = "zero3";
  engine::DType param = engine::DType::kF32;
  bool on_gpu = false;  ///< GPU 0, one rank

  std::string name() const;
};

const std::vector<TrainingRow>& training_rows();

/// What rank 0 measured, a value for each timed step. On a GPU nothing inside a step is timed:
/// step_ms is from the end of one step to the end of the next, which the host launches meanwhile.
struct TrainingTimes {
  std::vector<double> step_ms;
  engine::MemoryStats memory;  ///< after the last step
  std::vector<double> forward_ms, backward_ms;
  std::vector<double> finish_ms;        ///< last reductions, norm of the gradient
  std::vector<double> optimizer_ms;     ///< and the copies in the parameter dtype
  std::vector<double> exposed_comm_ms;  ///< compute waiting for collectives, within the others
};

inline constexpr std::int64_t kWarmupSteps = 3;

/// Builds the model and runs kWarmupSteps that do not count and `num_steps` that do. `log`, if not
/// null, hears what rank 0 launches in those.
TrainingTimes run_training(const TrainingRow& row, std::int64_t num_steps,
                           LaunchLog* log = nullptr);

}  // namespace tessera::tools
