// Choices that meet: every pair of them has the bits of one process.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/shard/toy_training.h"
#include "tests/testing/covering.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using engine::DType;
using testing::CoveringRow;
using testing::LevelPair;
using testing::train;
using testing::Training;

constexpr int kMicroBatches = 12;  // of a step, over all ranks, and with kMore twice as many

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
constexpr std::array kStrategies = {"ddp",           "zero1", "zero2",        "zero3",
                                    "shard_grad_op", "hsdp",  "hybrid_zero2", "hfsdp"};
constexpr std::array<double, 4> kFractions = {0, 0.3, 0.75, 1};
constexpr std::array<Precision, 4> kPrecisions = {
    Precision{}, Precision{.param = DType::kBF16},
    Precision{DType::kBF16, DType::kBF16, DType::kF32},
    Precision{DType::kBF16, DType::kF32, DType::kBF16}};
const std::vector<int> kLevels = {int(kStrategies.size()), 4, 2, 4, 4, 4, 4, 3, 2, 2, 2};

Training training_of(const CoveringRow& row) {
  const auto level = [&](Choice choice) { return static_cast<std::size_t>(row[choice]); };
  Training t{.ranks = row[kRanks] + 1, .steps = 2, .blocks = 3, .numel = 301, .poison = true};
  t.accum = kMicroBatches * (row[kMore] + 1) / t.ranks;
  const char* const strategy = kStrategies[level(kStrategy)];
  t.options.placement = Placement::preset(strategy);
  if (!t.options.placement.is_whole()) {
    t.options.shard_ranks =
        row[kShardRanks] == 1 ? t.ranks : default_shard_ranks(strategy, t.ranks);
  }
  t.options.precision = kPrecisions[level(kPrecision)];
  t.options.offload = {.parameters = kFractions[level(kParametersOffload)],
                       .gradients = kFractions[level(kGradientsOffload)],
                       .optimizer = kFractions[level(kOptimizerOffload)],
                       .threads = 1 + row[kMore]};
  if (row[kOverlap] == 1) t.in_backward = UpdateGathers::kContiguous;
  if (row[kOverlap] == 2) t.in_backward = UpdateGathers::kInterleaved;
  t.recompute = row[kRecompute] == 1;
  t.adamw = row[kOptimizerOffload] > 0 || row[kRecompute] == 1;
  t.max_norm = row[kClip] == 1 ? 0.5 : 0;
  return t;
}

bool is_allowed(const CoveringRow& row) {
  // A grid with one axis of one rank has one shape of it.
  const bool is_hybrid_row = is_hybrid(kStrategies[static_cast<std::size_t>(row[kStrategy])]);
  if (row[kShardRanks] == 1 && !is_hybrid_row) return false;
  // The norm of an early update comes too late to clip.
  if (row[kClip] == 1 && row[kOverlap] != 0) return false;
  // What is computed with where it lies stays there.
  const Training t = training_of(row);
  return t.options.offload.parameters == 0 ||
         can_offload_parameters(t.options.placement, t.options.precision);
}

// One process that accumulates the same micro-batches, with nothing cut, moved or overlapped.
const std::vector<float>& one_process(Training run) {
  static std::map<std::tuple<int, int, int, int, bool, bool>, std::vector<float>> known;
  const Precision precision = run.options.precision;
  run.accum *= run.ranks;
  auto& result = known[{run.accum, int(precision.param), int(precision.reduce),
                        int(precision.accumulate), run.adamw, run.max_norm > 0}];
  if (result.empty()) {
    run.ranks = 1;
    run.options = {.placement = Placement::preset("ddp"), .precision = precision};
    run.in_backward = {};
    run.recompute = run.poison = false;
    result = train(run);
  }
  return result;
}

TEST(Covering, EveryPairOfChoicesHasTheBitsOfOneProcess) {
  const testing::CoveringRows covering = testing::covering_rows(kLevels, is_allowed);
  std::set<LevelPair> impossible = {{kOverlap, 1, kClip, 1}, {kOverlap, 2, kClip, 1}};
  for (const int strategy : {0, 1, 2, 3, 4}) {
    impossible.insert({kStrategy, strategy, kShardRanks, 1});
  }
  EXPECT_EQ(covering.impossible, impossible);
  EXPECT_GE(covering.rows.size(), 32u);
  EXPECT_LT(covering.rows.size(), 60u);
  for (std::size_t number = 0; number < covering.rows.size(); ++number) {
    if (testing::kIsSlow && number % 5 != 0) continue;
    const CoveringRow& row = covering.rows[number];
    Training run = training_of(row);
    if (number % 4 == 0) run.delay_seed = 1 + number;
    ASSERT_TRUE(train(run) == one_process(run))
        << "row " << number << ": " << ::testing::PrintToString(row);
  }
}

}  // namespace
}  // namespace tessera::shard
