// Choices of which every two meet, and what a step with them must equal to the bit.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <tuple>
#include <vector>

#include "tests/shard/toy_training.h"
#include "tests/testing/covering.h"

namespace tessera::testing {

inline constexpr int kMicroBatches = 12;  // of a step, over all ranks, and with kMore twice as many

/// The columns of a row.
enum Choice : std::size_t {
  kStrategy,
  kRanks,
  kShardRanks,  // 0: the strategy's own, 1: all ranks
  kPrecision,
  kParametersOffload,
  kGradientsOffload,
  kOptimizerOffload,
  kOverlap,
  kMore,  // micro-batches
  kRecompute,
  kClip,
};
inline constexpr std::array kStrategies = {"ddp",           "zero1", "zero2",        "zero3",
                                           "shard_grad_op", "hsdp",  "hybrid_zero2", "hfsdp"};
inline constexpr std::array<double, 4> kFractions = {0, 0.3, 0.75, 1};
inline constexpr std::array<shard::Precision, 4> kPrecisions = {
    shard::Precision{}, shard::Precision{.param = engine::DType::kBF16},
    shard::Precision{engine::DType::kBF16, engine::DType::kBF16, engine::DType::kF32},
    shard::Precision{engine::DType::kBF16, engine::DType::kF32, engine::DType::kBF16}};
inline const std::vector<int> kLevels = {int(kStrategies.size()), 4, 2, 4, 4, 4, 4, 3, 2, 2, 2};

/// What a row of levels stands for.
inline Training training_of(const CoveringRow& row) {
  const auto level = [&](Choice choice) { return static_cast<std::size_t>(row[choice]); };
  Training t{.ranks = row[kRanks] + 1, .steps = 2, .blocks = 3, .numel = 301, .poison = true};
  t.accum = kMicroBatches * (row[kMore] + 1) / t.ranks;
  const char* const strategy = kStrategies[level(kStrategy)];
  t.options.placement = shard::Placement::preset(strategy);
  if (row[kShardRanks] == 1) t.options.placement.shard_ranks = shard::Placement::kAllRanks;
  t.options.precision = kPrecisions[level(kPrecision)];
  t.options.offload = {.parameters = kFractions[level(kParametersOffload)],
                       .gradients = kFractions[level(kGradientsOffload)],
                       .optimizer = kFractions[level(kOptimizerOffload)],
                       .threads = 1 + row[kMore]};
  if (row[kOverlap] == 1) t.in_backward = shard::UpdateGathers::kContiguous;
  if (row[kOverlap] == 2) t.in_backward = shard::UpdateGathers::kInterleaved;
  t.recompute = row[kRecompute] == 1;
  t.adamw = row[kOptimizerOffload] > 0 || row[kRecompute] == 1;
  t.max_norm = row[kClip] == 1 ? 0.5 : 0;
  return t;
}

inline bool is_allowed(const CoveringRow& row) {
  // A grid with one axis of one rank has one shape of it.
  const char* const strategy = kStrategies[static_cast<std::size_t>(row[kStrategy])];
  if (row[kShardRanks] == 1 && !shard::Placement::preset(strategy).is_hybrid()) return false;
  // The norm of an early update comes too late to clip.
  if (row[kClip] == 1 && row[kOverlap] != 0) return false;
  // What is computed with where it lies stays there.
  const Training t = training_of(row);
  return t.options.offload.parameters == 0 ||
         shard::can_offload_parameters(t.options.placement, t.options.precision);
}

/// One process on the CPU that accumulates the same micro-batches, with nothing cut, moved or
/// overlapped.
inline const std::vector<float>& one_process(Training run) {
  static std::map<std::tuple<int, int, int, int, bool, bool>, std::vector<float>> known;
  const shard::Precision precision = run.options.precision;
  run.accum *= run.ranks;
  auto& result = known[{run.accum, int(precision.param), int(precision.reduce),
                        int(precision.accumulate), run.adamw, run.max_norm > 0}];
  if (result.empty()) {
    run.ranks = 1;
    run.num_gpus = 0;
    run.options = {.placement = shard::Placement::preset("ddp"), .precision = precision};
    run.in_backward = {};
    run.recompute = run.poison = false;
    result = train(run);
  }
  return result;
}

}  // namespace tessera::testing
