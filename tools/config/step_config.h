// The options of a step: batches, optimizer, learning rate, guards: --train.*.
#pragma once

#include <cstdint>

#include "tools/cli/flags.h"
#include "tools/models/model.h"

namespace tessera::tools {

enum class OptimizerKind { kAdamW, kSgd };
enum class ScheduleKind { kConstant, kCosine, kLinear };
/// When gradients are reduced under accumulation: last keeps them whole until the last micro-step.
enum class AccumComm { kEvery, kLast };
/// Updates during the last backward of a step; see shard::UpdateGathers.
enum class OverlapOptimizer { kNone, kBackward, kInterleaved };
/// What loss and gradient of a step are a mean of: micro-batches, each of which is a mean itself,
/// or all targets that are learned. kAuto: as the data are; a program says which before it trains.
enum class LossMean { kAuto, kBatches, kTokens };

struct StepConfig {
  std::int64_t steps = 0;
  std::int64_t batch = 0;  ///< per rank and micro-step
  std::int64_t accum = 1;
  AccumComm accum_comm = AccumComm::kEvery;
  LossMean loss_mean = LossMean::kBatches;
  std::int64_t seed = 1337;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double lr = 0;
  double momentum = 0.9;
  double weight_decay = 0.1;
  double beta1 = 0.9, beta2 = 0.99, eps = 1e-8;
  OverlapOptimizer overlap_optimizer = OverlapOptimizer::kNone;
  double grad_clip = 1;        ///< 0: off
  std::int64_t max_skips = 0;  ///< updates in a row, for gradients that are not finite
  bool check_gradients = false;
  double max_minutes = 0;         ///< of training; 0: no limit
  double spike_factor = 0;        ///< of the median loss; 0: off. See step_guard.h
  std::int64_t verify_every = 0;  ///< steps; 0: off. See step_guard.h
  std::int64_t warmup = 0;
  ScheduleKind schedule = ScheduleKind::kCosine;
  Recompute recompute = false;

  /// Whether the loss of a micro-step is a sum, and not a mean.
  bool sums_losses() const { return loss_mean == LossMean::kTokens; }
  /// Whether some steps may be made twice.
  bool guards() const { return spike_factor > 0 || verify_every > 0; }
  /// Learning rate of `step` (from 0): linear warmup, then the schedule down to 0 at `steps`.
  double lr_at(std::int64_t step) const;

  void add_to(FlagSet& flags);
  /// Throws InvalidArgument for values that contradict each other or would have no effect. `flags`
  /// tells which were asked for.
  void validate(const FlagSet& flags) const;
  /// "train.spike_factor" or "train.verify_every": why some steps may be made twice.
  const char* guarding_option() const;
};

}  // namespace tessera::tools
