// Budgets: the ladder, the bits of what it settles on, and that what fits is enough for every rank.
#include "tools/planning/budget.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/tools/testing/gpt_run.h"
#include "tests/tools/testing/planned_gpt.h"
#include "tools/io/nbytes.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::tools {
namespace {

using engine::DType;
using testing::base;
using testing::kind_of;
using testing::kModel;
using testing::plan_of;
using testing::run_gpt;
using testing::tokens;

TEST(Budget, ReadsSizes) {
  EXPECT_EQ(parse_nbytes("12345", "m"), 12'345);
  EXPECT_EQ(parse_nbytes("7 B", "m"), 7);
  EXPECT_EQ(parse_nbytes("3kB", "m"), 3'000);
  EXPECT_EQ(parse_nbytes("700MB", "m"), 700'000'000);
  EXPECT_EQ(parse_nbytes("1.5 GB", "m"), 1'500'000'000);
  EXPECT_EQ(parse_nbytes("2TB", "m"), 2'000'000'000'000);
  EXPECT_EQ(parse_nbytes("3KiB", "m"), 3'072);
  EXPECT_EQ(parse_nbytes("0.5MiB", "m"), 524'288);
  EXPECT_EQ(parse_nbytes("40GiB", "m"), 42'949'672'960);
  EXPECT_EQ(parse_nbytes("2TiB", "m"), 2'199'023'255'552);
  for (const char* bad :
       {"", "GiB", "-1GiB", "40 parsecs", "1e30GiB", "0", "nan", "inf", "4G iB"}) {
    EXPECT_TRUE(testing::has(
        testing::error_of<engine::InvalidArgument>([&] { parse_nbytes(bad, "memory_budget"); }),
        {"memory_budget", "40GiB", "'" + std::string(bad) + "'"}))
        << bad;
  }
}

// Whatever a budget makes of a training has its bits.
void expect_same_bits(const TrainConfig& asked, const std::vector<std::string>& seen) {
  const auto plan = [](const TrainConfig& c) { return plan_of(c); };
  const auto peak = [](const TrainConfig& c) { return peak_nbytes(plan_of(c)); };
  const std::string hash = run_gpt(asked, kModel, tokens()).params_sha256;
  const std::int64_t most = peak(asked);
  EXPECT_EQ(fit_budget(asked, most, kModel.layers, plan).rungs.size(), 1u);
  std::string chosen;
  // Down to where nothing fits any more, each a little less than the one before needs.
  for (std::int64_t budget = most - 1;;) {
    std::optional<BudgetPlan> fitted;
    try {
      fitted = fit_budget(asked, budget, kModel.layers, plan);
    } catch (const engine::InvalidArgument& e) {
      EXPECT_TRUE(
          testing::has(e.what(), {"as asked", "too much", "the smallest budget that fits"}));
      break;
    }
    const BudgetRung& rung = fitted->rungs.back();
    EXPECT_EQ(peak(fitted->config), rung.nbytes);
    ASSERT_LE(rung.nbytes, budget);
    EXPECT_EQ(run_gpt(fitted->config, kModel, tokens()).params_sha256, hash) << rung.what;
    chosen += rung.what + "\n";
    budget = rung.nbytes - 1 - most / 10;
  }
  for (const std::string& option : seen) EXPECT_TRUE(testing::has(chosen, {option})) << chosen;
}

TEST(Budget, GivesUpWhatItNeedsAndKeepsTheBits) {
  TrainConfig config = base(2);
  config.offload.threads = 2;
  expect_same_bits(
      config,
      {"train.recompute=", "offload.optimizer=", "offload.gradients=", "offload.parameters="});
}

// With the least that there is, all is given up.
TEST(Budget, ReshardsWhereNothingElseIsLeft) {
  TrainConfig kept = base(2);
  kept.parallel.strategy = "shard_grad_op";
  kept.precision.param = DType::kBF16;
  kept.offload.threads = 2;
  TrainConfig least = kept;
  least.parallel.prefetch = least.parallel.reductions_in_flight = 0;
  least.parallel.reshard_after_forward = "true";
  least.train.recompute = true;
  least.offload = {.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 2};
  const auto plan = [](const TrainConfig& c) { return plan_of(c); };
  const BudgetPlan fitted = fit_budget(kept, peak_nbytes(plan_of(least)), kModel.layers, plan);
  EXPECT_TRUE(testing::has(fitted.rungs.back().what, {"parallel.reshard_after_forward=true",
                                                      "parallel.prefetch=0", "offload."}))
      << fitted.rungs.back().what;
  EXPECT_EQ(run_gpt(fitted.config, kModel, tokens()).params_sha256,
            run_gpt(kept, kModel, tokens()).params_sha256);
}

// Backward begins with the last block, which is whole by then either way.
TEST(Budget, EachBlockThatIsRecomputedSavesMemoryButTheLast) {
  TrainConfig config = base(2);
  config.parallel.prefetch = config.parallel.reductions_in_flight = 0;
  const auto peak_of_first = [&](std::int64_t blocks) {
    config.train.recompute = Recompute::first(blocks);
    return peak_nbytes(plan_of(config));
  };
  for (std::int64_t blocks = 1; blocks < kModel.layers; ++blocks) {
    EXPECT_LT(peak_of_first(blocks), peak_of_first(blocks - 1)) << blocks;
  }
  EXPECT_EQ(peak_of_first(kModel.layers), peak_of_first(kModel.layers - 1));
}

// As run_task() gives it to the trainer: what is over the budget is refused when it is asked for.
TEST(Budget, ATrainerThatNeedsMoreNamesTheTensor) {
  TrainConfig config = base(2);
  const TrainPlan plan = plan_of(config);
  const std::int64_t most = plan.steps[1].step_memory.peak_total_nbytes;
  const auto error_within = [&](std::int64_t nbytes) {
    config.memory_budget = std::to_string(nbytes);
    return testing::error_of<engine::Error>([&] { run_gpt(config, kModel, tokens()); });
  };
  EXPECT_TRUE(testing::has(error_within(most - 1),
                           {fmt::format("[memory] expected to stay within {} bytes", most - 1),
                            "more asked for, ", " ("}));
  // Shards come first.
  EXPECT_TRUE(testing::has(error_within(2000), {"parameter_shard (h.0.wire)"}));
  config.memory_budget = std::to_string(peak_nbytes(plan));
  EXPECT_EQ(run_gpt(config, kModel, tokens()).records.size(), 5u);
}

// A part of what is offloaded is found by units, and ranks own parts of different ones.
TEST(Budget, IsForTheRankThatNeedsMost) {
  TrainConfig config = base(4);
  config.parallel.strategy = "zero1";
  config.parallel.unit_min_numel = 40'000;
  config.precision.param = DType::kBF16;
  config.offload = {.parameters = 0.31, .gradients = 0.62, .optimizer = 0.47, .threads = 2};
  const auto peak = [&](int rank) { return peak_nbytes(plan_of(config, kModel, rank)); };
  const std::int64_t most = peak_nbytes(most_of_ranks(
      4, [&](int rank) { return kind_of(config, rank); },
      [&](int rank) { return plan_of(config, kModel, rank); }));
  EXPECT_EQ(most, std::max({peak(0), peak(1), peak(2), peak(3)}));
  ASSERT_GT(most, peak(0));
  config.memory_budget = std::to_string(peak(0));
  EXPECT_TRUE(testing::has(
      testing::error_of<engine::Error>([&] { run_gpt(config, kModel, tokens()); }), {"[memory]"}));
  config.memory_budget = std::to_string(most);
  EXPECT_EQ(run_gpt(config, kModel, tokens()).records.size(), 5u);
}

TEST(Budget, TheMostOfAllKindsCounts) {
  for (const std::string kinds : {"aab", "bba", "cab"}) {
    std::string planned;
    const auto kind = [&](int rank) { return std::string(1, kinds[std::size_t(rank)]); };
    const auto plan = [&](int rank) {
      planned += kind(rank);
      TrainPlan made{};
      made.steps.resize(1);
      made.between_steps_nbytes = kind(rank) == "b" ? 5 : 3;
      return made;
    };
    EXPECT_EQ(peak_nbytes(most_of_ranks(3, kind, plan)), 5) << kinds;
    EXPECT_EQ(planned.size(), kinds == "cab" ? 3u : 2u);
  }
}

// By counts, as no time is asserted: what a budget costs is one plan for each rung and kind of
// rank, and a plan costs its launches.
TEST(Budget, PlansOneRankOfEachKind) {
  TrainConfig config = base(64);
  const auto planned = [&] {
    int num_plans = 0;
    const std::int64_t most = peak_nbytes(most_of_ranks(
        64, [&](int rank) { return kind_of(config, rank); },
        [&](int rank) { return ++num_plans, plan_of(config, kModel, rank); }));
    for (const int rank : {0, 1, 20, 31, 32, 62, 63}) {
      EXPECT_LE(peak_nbytes(plan_of(config, kModel, rank)), most) << rank;
    }
    return num_plans;
  };
  EXPECT_EQ(planned(), 1);
  config.offload.optimizer = 0.5;
  EXPECT_EQ(planned(), 1) << "all shards are cut alike";
  // The whole sums are cut in one place, on one rank: before it, there, after it; and so in units
  // of two sizes.
  config.parallel.strategy = "zero1";
  config.offload = {.gradients = 0.3};
  const int num_kinds = planned();
  EXPECT_GE(num_kinds, 2);
  EXPECT_LE(num_kinds, 5);
}

TEST(Budget, CostsOnePlanWhereThereIsRoom) {
  Gpt model(kModel);
  TransformerConfig config;
  static_cast<TrainConfig&>(config) = base(8);
  config.parallel.strategy = "zero1";
  config.precision.param = DType::kBF16;
  config.memory_budget = "1TiB";
  const BudgetPlan all = fit_transformer(config, model, {.num_ranks = 8});
  EXPECT_EQ(all.num_plans, 1);
  EXPECT_TRUE(all.options.empty());
}

// Between replicas a rank compresses the pieces of parameters that its shard has.
TEST(Budget, IsForTheShardThatCompressesMost) {
  TrainConfig config = base(4);
  config.parallel.strategy = "hsdp";
  config.parallel.shard_ranks = 2;
  config.comm.hook = "powersgd";
  config.comm.powersgd.across_replicas = true;
  config.comm.powersgd.low_rank = {.rank = 2, .min_compression_rate = 1};
  const auto peak = [&](int rank) { return peak_nbytes(plan_of(config, kModel, rank)); };
  int num_plans = 0;
  const std::int64_t most = peak_nbytes(most_of_ranks(
      4, [&](int rank) { return kind_of(config, rank); },
      [&](int rank) { return ++num_plans, plan_of(config, kModel, rank); }));
  EXPECT_EQ(most, std::max({peak(0), peak(1), peak(2), peak(3)}));
  EXPECT_NE(peak(0), peak(1));
  EXPECT_EQ(num_plans, 2) << "of two replicas";
  config.memory_budget = std::to_string(most);
  EXPECT_EQ(run_gpt(config, kModel, tokens()).records.size(), 5u);
}

// What is recomputed as asked stays so: the ladder goes on from there.
TEST(Budget, RecomputesNoFewerBlocksThanAsked) {
  TrainConfig config = base(2);
  config.parallel.prefetch = config.parallel.reductions_in_flight = 0;
  config.train.recompute = Recompute::first(2);
  std::vector<std::int64_t> planned;
  const BudgetPlan plan = fit_budget(config, 70, 48, [&](const TrainConfig& c) {
    planned.push_back(c.train.recompute.blocks);
    TrainPlan plan{};
    plan.steps.resize(1);
    const std::int64_t blocks = std::min<std::int64_t>(c.train.recompute.blocks, 48);
    const OffloadConfig& o = c.offload;
    plan.between_steps_nbytes = 100 - blocks;
    plan.steps[0].step_ms =
        static_cast<double>(blocks) + 100 * (o.optimizer + o.gradients + o.parameters);
    return plan;
  });
  EXPECT_EQ(plan.config.train.recompute, Recompute::first(30));
  EXPECT_EQ(std::ranges::min(planned), 2);
}

}  // namespace
}  // namespace tessera::tools
