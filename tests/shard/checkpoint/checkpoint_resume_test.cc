// Resumed training has the bits of training that was not interrupted: a covering set of choices
// before and after.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "shard/hooks/hooks.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/covering.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using engine::DType;
using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::TempFolder;
using testing::train_saving;
using testing::Training;

constexpr std::array kStrategies = {"zero3", "ddp", "zero1", "zero2", "hsdp", "hfsdp"};
constexpr std::array<double, 3> kFractions = {0, 0.4, 1};
constexpr std::array<std::int64_t, 3> kNumels = {301, 130, 3};  // the last: fewer than ranks

// What a row chooses. Before and after have choices of their own.
enum Choice {
  kOptimizer,
  kPrecision,
  kAccum,
  kClip,
  kAsync,
  kNumel,
  kStrategy,
  kRanks,
  kShardRanks,
  kPrefetch,
  kPacking,
  kOffload,
  kEarly,
  kShared = kStrategy,
};
constexpr std::array kLevels = {2, 2, 2, 2, 2, 3, 6, 5, 2, 3, 2, 3, 3};
constexpr int kSide = static_cast<int>(kLevels.size()) - kShared;

using Row = testing::CoveringRow;  // levels: what is shared, before, after

std::vector<Row> rows_to_show() {
  std::vector<int> num_levels(kLevels.begin(), kLevels.end());
  num_levels.insert(num_levels.end(), kLevels.begin() + kShared, kLevels.end());
  return testing::covering_rows(num_levels).rows;
}

// `side`: 0 before, 1 after. `micro_batches`: of a step, over all ranks.
Training training_of(const Row& row, int side, int micro_batches) {
  const auto level = [&](int choice) {
    return row[static_cast<std::size_t>(choice + (choice >= kShared ? side * kSide : 0))];
  };
  Training t{.ranks = level(kRanks) + 1,
             .blocks = 3,
             .numel = kNumels[static_cast<std::size_t>(level(kNumel))],
             .adamw = level(kOptimizer) == 1,
             .poison = true};
  t.accum = micro_batches / t.ranks;
  const char* const strategy = kStrategies[static_cast<std::size_t>(level(kStrategy))];
  t.options.placement = Placement::preset(strategy);
  if (level(kShardRanks) == 1) t.options.placement.shard_ranks = Placement::kAllRanks;
  if (level(kPrecision) == 1) t.options.precision.param = DType::kBF16;
  t.options.prefetch = level(kPrefetch);
  t.options.unit_min_numel = level(kPacking) == 1 ? 700 : 0;
  const double fraction = kFractions[static_cast<std::size_t>(level(kOffload))];
  t.options.offload.optimizer = fraction;
  t.options.offload.gradients = fraction;
  if (can_offload_parameters(t.options.placement, t.options.precision)) {
    t.options.offload.parameters = fraction;
  }
  if (level(kEarly) == 1) t.in_backward = UpdateGathers::kInterleaved;
  if (level(kEarly) == 2) t.in_backward = UpdateGathers::kContiguous;
  return t;
}

TEST(CheckpointResume, HasTheBitsOfTrainingThatWasNotInterrupted) {
  const std::vector<Row> rows = rows_to_show();
  EXPECT_GT(rows.size(), 36u);
  EXPECT_LT(rows.size(), 80u);
  testing::for_each_concurrently(rows, [&](const Row& row) {
    const auto number = static_cast<std::size_t>(&row - rows.data());
    if (testing::kIsSlow && number % 5 != 0) return;
    const int before_ranks = row[kRanks] + 1, after_ranks = row[kRanks + kSide] + 1;
    const int micro_batches = std::lcm(before_ranks, after_ranks) * (row[kAccum] + 1);
    const TempFolder folder;
    CheckpointRun before{.training = training_of(row, 0, micro_batches),
                         .checkpoints = {.folder = folder / "c", .async = row[kAsync] == 1}};
    CheckpointRun after = before;
    after.training = training_of(row, 1, micro_batches);
    // The norm of an early update comes too late to clip.
    if (row[kClip] == 1 && !before.training.in_backward && !after.training.in_backward) {
      before.training.max_norm = after.training.max_norm = 0.5;
    }
    CheckpointRun whole = after;
    whole.training.options = {.placement = Placement::preset("zero3"),
                              .precision = after.training.options.precision};
    whole.training.in_backward = {};
    whole.training.steps = 5;
    whole.save_every = 0;
    const CheckpointResult expected = train_saving(whole);
    if (number % 8 == 0) before.training.delay_seed = after.training.delay_seed = 10 + number;
    before.training.steps = 2;
    train_saving(before);
    after.training.steps = 5;
    const CheckpointResult result = train_saving(after);
    EXPECT_EQ(result.first_step, 2);
    const std::vector<float> norms(expected.norms.begin() + 2, expected.norms.end());
    EXPECT_EQ(result.norms, norms) << "row " << number;
    ASSERT_TRUE(result.values == expected.values)
        << "row " << number << ": " << ::testing::PrintToString(row);
  });
}

// What compresses one matrix a unit, each matrix of a unit, and each with words of 16 bits.
constexpr std::array kHooks = {"batched_powersgd", "powersgd", "f16+powersgd"};

CheckpointRun hooked(const TempFolder& folder, const std::string& name, const char* strategy,
                     int ranks, int steps, bool across_replicas = false) {
  CheckpointRun run{.training = {.ranks = ranks, .steps = steps, .poison = true},
                    .checkpoints = {.folder = folder / "c"}};
  Training& t = run.training;
  t.options.placement = Placement::preset(strategy);
  HookOptions hook;
  set_hook(hook, name);
  hook.powersgd.start_step = 1;
  hook.powersgd.low_rank.min_compression_rate = 0;
  hook.powersgd.across_replicas = across_replicas;
  t.options.reducer = make_hook(hook);
  t.options.reducer_text = describe(hook);
  run.prepare = [](testing::ToyModel& model) {
    for (const auto& layer : model.layers) layer->weight.shape = {20, 15};
  };
  return run;
}

TEST(CheckpointResume, KeepsWhatAHookRemembersToTheBit) {
  struct Case {
    const char *strategy, *name;
    bool async;
  };
  std::vector<Case> cases;
  std::size_t number = 0;
  for (const char* strategy : kStrategies) {
    number += 1;
    for (const char* name : kHooks) {
      // Each strategy with one hook.
      if (number++ % kHooks.size() != 0 && testing::kIsSlow) continue;
      cases.push_back({strategy, name, cases.size() % 2 == 0});
    }
  }
  testing::for_each_concurrently(cases, [](const Case& c) {
    const TempFolder folder, without;
    CheckpointRun run = hooked(folder, c.name, c.strategy, 4, 3);
    run.checkpoints.async = c.async;
    run.training.adamw = c.async;
    train_saving(run);
    run.training.steps = 6;
    const CheckpointResult result = train_saving(run);
    EXPECT_EQ(result.first_step, 3);
    CheckpointRun whole = run;
    whole.checkpoints.folder = without / "c";
    EXPECT_TRUE(train_saving(whole).values == result.values) << c.strategy << " " << c.name;
  });
}

// Two replicas owe two parts, cut alike in both strategies.
TEST(CheckpointResume, KeepsWhatReplicasOweToTheBit) {
  const std::pair<const char*, const char*> cases[] = {
      {"hsdp", "hsdp"}, {"hfsdp", "hfsdp"}, {"hsdp", "hybrid_zero2"}, {"hybrid_zero2", "hsdp"}};
  int number = 0;
  for (const auto& of_case : cases) {
    for (const std::string name : kHooks) {
      ++number;
      // Each pair of strategies with one hook.
      const bool is_one_of_few = number == 1 || number == 5 || number == 8 || number == 12;
      if (testing::kIsSlow && !is_one_of_few) continue;
      const auto run_of = [&](const TempFolder& folder, const char* strategy, int steps) {
        CheckpointRun run = hooked(folder, name, strategy, 4, steps, true);
        run.checkpoints.async = run.training.adamw = number % 2 == 0;
        run.training.accum = 1 + number % 3;
        if (number % 4 > 1) run.training.in_backward = UpdateGathers::kInterleaved;
        run.training.options.offload.gradients = number % 5 == 0 ? 1 : 0;
        return run;
      };
      const TempFolder folder, without;
      train_saving(run_of(folder, of_case.first, 3));
      const CheckpointResult result = train_saving(run_of(folder, of_case.second, 6));
      EXPECT_EQ(result.first_step, 3);
      const CheckpointResult whole = train_saving(run_of(without, of_case.first, 6));
      EXPECT_TRUE(whole.values == result.values)
          << of_case.first << " to " << of_case.second << " " << name;
    }
  }
}

// The sum over ranks of what each owes, by parameter.
std::map<std::string, std::vector<double>> owed(const Fsdp& fsdp, comm::ProcessGroup& world) {
  static std::mutex mutex;
  static std::map<std::string, std::vector<double>> sums;
  const auto meet = [&] { world.barrier("owed"); };
  if (world.rank() == 0) sums.clear();
  meet();
  for (const HookTensor& t : save_hooks(fsdp)) {
    if (t.name != "powersgd.error") continue;
    const std::scoped_lock lock(mutex);
    std::vector<double>& sum = sums[t.parameter];
    const auto begin = static_cast<std::size_t>(t.begin);
    sum.resize(std::max(sum.size(), begin + t.values.size()));
    for (std::size_t i = 0; i < t.values.size(); ++i) sum[begin + i] += t.values[i];
  }
  meet();
  return sums;
}

TEST(CheckpointResume, OtherRanksOweTheSameSum) {
  for (const std::string name : kHooks) {
    for (const int ranks : {1, 2, 3, 5}) {
      const bool across_replicas = ranks % 2 == 1;  // before
      const TempFolder folder;
      std::map<std::string, std::vector<double>> before, after;
      CheckpointRun run =
          hooked(folder, name, across_replicas ? "hfsdp" : "zero3", 4, 3, across_replicas);
      run.at_end = [&](const testing::CheckpointRank& rank, int) {
        const auto sums = owed(rank.fsdp, rank.world);
        if (rank.world.rank() == 0) before = sums;
      };
      train_saving(run);
      run = hooked(folder, name, "ddp", ranks, 3);
      run.at_end = [&](const testing::CheckpointRank& rank, int) {
        const auto sums = owed(rank.fsdp, rank.world);
        if (rank.world.rank() == 0) after = sums;
      };
      EXPECT_EQ(train_saving(run).first_step, 3);
      ASSERT_EQ(before.size(), name == "batched_powersgd" ? 7u : 3u);
      ASSERT_EQ(after.size(), before.size());
      double largest = 0;
      for (const auto& [parameter, sum] : before) {
        ASSERT_EQ(after[parameter].size(), sum.size());
        for (std::size_t i = 0; i < sum.size(); ++i) {
          largest = std::max(largest, std::abs(sum[i]));
          EXPECT_NEAR(after[parameter][i], sum[i], 1e-6 * std::max(1.0, std::abs(sum[i])))
              << name << " " << parameter;
        }
      }
      EXPECT_GT(largest, 0.01) << name;
    }
  }
}

}  // namespace
}  // namespace tessera::shard
