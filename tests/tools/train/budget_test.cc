// Budgets: the ladder, the bits of what it settles on, and that what fits is enough for every rank.
#include "tools/train/budget.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/tools/train/gpt_run.h"
#include "tests/tools/train/planned_gpt.h"
#include "tools/io/nbytes.h"
#include "tools/train/transformer_plan.h"

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

TEST(Budget, WalksDownUntilThePlanFits) {
  const TrainConfig config = base(2);
  const auto plan = [](const TrainConfig& c) { return plan_of(c); };
  const auto peak = [](const TrainConfig& c) { return peak_nbytes(plan_of(c)); };
  const std::int64_t asked = peak(config);
  const auto fit = [&](std::int64_t budget_nbytes) {
    return fit_budget(config, budget_nbytes, kModel.layers, plan);
  };
  const BudgetPlan same = fit(asked);
  EXPECT_EQ(same.rungs.size(), 1u);
  const BudgetPlan less = fit(asked - 1);
  EXPECT_EQ(less.config.parallel.prefetch, 0);
  EXPECT_EQ(less.rungs.back().what, "parallel.prefetch=0");
  EXPECT_EQ(peak(less.config), less.rungs.back().nbytes);
  EXPECT_LT(less.rungs.back().nbytes, asked);
  // The end of the ladder, and beyond.
  std::string all;
  try {
    fit(1);
  } catch (const engine::InvalidArgument& e) {
    all = e.what();
  }
  EXPECT_TRUE(testing::has(all, {"as asked", "train.recompute=true", "offload.optimizer=1",
                                 "offload.parameters=1", "too much"}));
  // What it settles on has the same bits.
  const std::string hash = run_gpt(config, kModel, tokens()).params_sha256;
  TrainConfig blocking = config;
  blocking.parallel.prefetch = blocking.parallel.reductions_in_flight = 0;
  const auto peak_of_first = [&](std::int64_t blocks) {
    blocking.train.recompute = Recompute::first(blocks);
    return peak(blocking);
  };
  // Backward begins with the last block, which is whole by then either way.
  EXPECT_EQ(peak_of_first(kModel.layers), peak_of_first(kModel.layers - 1));
  for (std::int64_t blocks = 1; blocks < kModel.layers; ++blocks) {
    const std::int64_t enough = peak_of_first(blocks);
    EXPECT_LT(enough, peak_of_first(blocks - 1)) << blocks;
    const BudgetPlan small = fit(enough);
    EXPECT_EQ(small.config.train.recompute.str(), std::to_string(blocks));
    EXPECT_EQ(small.rungs.back().what, fmt::format("train.recompute={}", blocks));
    EXPECT_EQ(small.rungs.back().nbytes, enough);
    for (std::size_t i = 1; i < small.rungs.size(); ++i) {
      EXPECT_GT(small.rungs[i - 1].nbytes, enough) << small.rungs[i].what;
    }
    EXPECT_EQ(small.config.offload.optimizer, 0);
    EXPECT_EQ(run_gpt(small.config, kModel, tokens()).params_sha256, hash) << blocks;
  }
}

// Rungs that only some configurations come to, each with the bits of what was asked.
TEST(Budget, ReshardsAndOffloadsWithTheSameBits) {
  const auto plan = [](const TrainConfig& c) { return plan_of(c); };
  const auto peak = [](const TrainConfig& c) { return peak_nbytes(plan_of(c)); };
  TrainConfig kept = base(2);
  kept.parallel.strategy = "shard_grad_op";
  kept.parallel.prefetch = kept.parallel.reductions_in_flight = 0;
  const BudgetPlan resharded = fit_budget(kept, peak(kept) - 1, kModel.layers, plan);
  EXPECT_EQ(resharded.rungs.back().what, "parallel.reshard_after_forward=true");
  EXPECT_EQ(run_gpt(resharded.config, kModel, tokens()).params_sha256,
            run_gpt(kept, kModel, tokens()).params_sha256);

  TrainConfig asked = base(2);
  asked.precision.param = DType::kBF16;
  const std::string hash = run_gpt(asked, kModel, tokens()).params_sha256;
  TrainConfig least = asked;
  least.parallel.prefetch = least.parallel.reductions_in_flight = 0;
  least.train.recompute = true;
  for (const auto& [rung, fraction] : {std::pair("offload.optimizer=1", &OffloadConfig::optimizer),
                                       {"offload.gradients=1", &OffloadConfig::gradients},
                                       {"offload.parameters=1", &OffloadConfig::parameters}}) {
    const std::int64_t before = peak(least);
    least.offload.*fraction = 1;
    ASSERT_LT(peak(least), before) << rung;
    const BudgetPlan fitted = fit_budget(asked, peak(least), kModel.layers, plan);
    EXPECT_EQ(fitted.rungs.back().what, rung);
    EXPECT_EQ(fitted.rungs.back().nbytes, peak(least));
    EXPECT_EQ(run_gpt(fitted.config, kModel, tokens()).params_sha256, hash) << rung;
  }
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
  // The whole sums are cut in one place, on one rank: before it, there, behind it; and so in units
  // of two sizes.
  config.parallel.strategy = "zero1";
  config.offload = {.gradients = 0.3};
  const int num_kinds = planned();
  EXPECT_GE(num_kinds, 2);
  EXPECT_LE(num_kinds, 5);
}

TEST(Budget, CostsAPlanForEachRung) {
  Gpt model(kModel);
  TransformerConfig config;
  static_cast<TrainConfig&>(config) = base(8);
  config.parallel.strategy = "zero1";
  config.precision.param = DType::kBF16;
  const PlanTarget target = {.num_ranks = 8};
  const auto fit = [&](std::int64_t budget_nbytes) {
    config.memory_budget = std::to_string(budget_nbytes);
    return fit_transformer(config, model, target);
  };
  const BudgetPlan all = fit(std::int64_t{1} << 40);
  EXPECT_EQ(all.num_plans, 1);
  EXPECT_TRUE(all.options.empty());
  const BudgetPlan less = fit(all.rungs.back().nbytes - 1);
  EXPECT_EQ(less.num_plans, std::ssize(less.rungs));
  EXPECT_GE(less.rungs.size(), 2u);
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
    plan.between_steps_nbytes = 100 - std::min<std::int64_t>(c.train.recompute.blocks, 48);
    return plan;
  });
  EXPECT_EQ(plan.config.train.recompute, Recompute::first(30));
  EXPECT_EQ(std::ranges::min(planned), 2);
  EXPECT_LE(planned.size(), 9u);
}

}  // namespace
}  // namespace tessera::tools
