// That a budget is met by the fastest plan that fits, against all plans of a grid; and what is said
// where nothing fits.
#include "tools/planning/budget_search.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/tools/testing/planned_gpt.h"
#include "tools/planning/budget.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::tools {
namespace {

using testing::base;
using testing::kModel;

struct Point {
  std::int64_t nbytes;
  double step_ms;
};

// Plans with `rates`, each configuration once.
class Plans {
 public:
  explicit Plans(const engine::MetaRates& rates) : rates_(rates) {}

  const TrainPlan& plan(const TrainConfig& config) {
    const auto& p = config.parallel;
    const std::string key = fmt::format(
        "{} {} {} {} {} {} {} {} {} {} {}", p.strategy, p.prefetch, p.reductions_in_flight,
        p.reshard_after_forward, std::min(config.train.recompute.blocks, kModel.layers),
        config.train.batch, config.train.accum, config.offload.parameters, config.offload.gradients,
        config.offload.optimizer, name_of(config.precision.param));
    const auto it = made_.find(key);
    if (it != made_.end()) return it->second;
    Gpt model(kModel);
    const engine::Shape shape{config.train.batch, kModel.seq};
    return made_[key] = make_plan(
               config, {.num_ranks = static_cast<int>(config.parallel.ranks), .rates = rates_},
               model,
               {{"tokens", shape, engine::DType::kI32}, {"targets", shape, engine::DType::kI32}});
  }
  Point point(const TrainConfig& config) {
    const TrainPlan& made = plan(config);
    return {peak_nbytes(made), made.steps.back().step_ms};
  }
  PlanMost all() {
    return [this](const TrainConfig& c) { return plan(c); };
  }

 private:
  engine::MetaRates rates_;
  std::map<std::string, TrainPlan> made_;
};

// Everything that a budget may change, each as it is asked for, all the way, or in between.
std::vector<Point> grid(const TrainConfig& asked, Plans& plans) {
  std::vector<Point> points;
  const std::vector<double> parts = {0, 0.5, 1};
  for (std::int64_t prefetch = 0; prefetch <= asked.parallel.prefetch; ++prefetch) {
    for (std::int64_t reductions = 0; reductions <= asked.parallel.reductions_in_flight;
         ++reductions) {
      for (std::int64_t blocks = 0; blocks <= kModel.layers; ++blocks) {
        for (const double optimizer : parts) {
          for (const double gradients : {0.0, 1.0}) {
            for (const double parameters : {0.0, 1.0}) {
              TrainConfig c = asked;
              c.parallel.prefetch = prefetch;
              c.parallel.reductions_in_flight = reductions;
              c.train.recompute = Recompute::first(blocks);
              c.offload.optimizer = optimizer;
              c.offload.gradients = gradients;
              c.offload.parameters = parameters;
              points.push_back(plans.point(c));
            }
          }
        }
      }
    }
  }
  return points;
}

TEST(BudgetSearch, FindsTheFastestOfAGrid) {
  // A link, a host's link and a host that are slow, each in turn: what is cheap to give up differs.
  const engine::MetaRates link = {.flops_per_s = 1e10, .link_bytes_per_s = 1e8};
  const engine::MetaRates host_link = {.flops_per_s = 1e10, .host_link_bytes_per_s = 2e8};
  const engine::MetaRates host = {.flops_per_s = 5e9, .host_bytes_per_s = 5e8};
  std::set<std::string> chosen;
  for (const engine::MetaRates& rates : {link, host_link, host}) {
    Plans plans(rates);
    TrainConfig asked = base(2);
    asked.offload.threads = 2;
    const std::vector<Point> points = grid(asked, plans);
    const auto [least, most] = std::ranges::minmax(points, {}, &Point::nbytes);
    for (const int tenth : {0, 1, 3, 5, 7, 9}) {
      const std::int64_t budget = least.nbytes + (most.nbytes - least.nbytes) * tenth / 10;
      double fastest_ms = 1e300;
      for (const Point& p : points) {
        if (p.nbytes <= budget) fastest_ms = std::min(fastest_ms, p.step_ms);
      }
      const BudgetPlan found = fit_budget(asked, budget, kModel.layers, plans.all());
      const Point is = plans.point(found.config);
      EXPECT_LE(is.nbytes, budget);
      EXPECT_LE(is.step_ms, fastest_ms) << tenth << ": " << found.rungs.back().what;
      EXPECT_EQ(found.rungs.back().nbytes, is.nbytes);
      EXPECT_EQ(found.rungs.back().step_ms, is.step_ms);
      EXPECT_LE(found.num_plans, 500);
      chosen.insert(found.rungs.back().what);
    }
  }
  EXPECT_GE(chosen.size(), 8u) << "a test in which one way is always best shows little";
}

// By hand: 10 blocks, each of which takes 10 bytes, or 1 ms to be recomputed; a gather ahead takes
// 25 bytes and saves 5 ms; a reduction in flight takes 5 bytes and saves 4 ms.
TrainPlan by_hand(const TrainConfig& c) {
  TrainPlan plan{};
  plan.steps.resize(1);
  const auto blocks = static_cast<double>(std::min<std::int64_t>(c.train.recompute.blocks, 10));
  const auto prefetch = static_cast<double>(c.parallel.prefetch);
  const auto reductions = static_cast<double>(c.parallel.reductions_in_flight);
  const double offloaded = c.offload.optimizer + c.offload.gradients + c.offload.parameters;
  const auto batch = static_cast<double>(c.train.batch), accum = static_cast<double>(c.train.accum);
  plan.between_steps_nbytes = static_cast<std::int64_t>(
      batch * (100 - 10 * blocks) + 25 * prefetch + 5 * reductions + 40 * (3 - offloaded) + 7);
  plan.steps[0].step_ms =
      batch * accum * (100 + blocks) - 5 * prefetch - 4 * reductions + 60 * offloaded;
  return plan;
}

TEST(BudgetSearch, GivesUpWhatIsCheapestByTheByte) {
  TrainConfig asked = base(2);
  asked.parallel.prefetch = 1;
  asked.parallel.reductions_in_flight = 1;
  const auto fit = [&](std::int64_t nbytes) { return fit_budget(asked, nbytes, 10, by_hand); };
  EXPECT_EQ(fit(257).rungs.size(), 1u);
  // A block: 0.1 ms a byte. Gathers: 0.2. Reductions: 0.8. Offload: 1.5.
  const std::vector<std::pair<std::int64_t, std::string>> expected = {
      {256, "train.recompute=1"},
      {247, "train.recompute=1"},
      {220, "train.recompute=4"},
      {157, "train.recompute=true"},
      {156, "parallel.prefetch=0, train.recompute=8"},
      {132, "parallel.prefetch=0, train.recompute=true"},
      {127, "parallel.prefetch=0, parallel.reductions_in_flight=0, train.recompute=true"},
  };
  for (const auto& [budget, what] : expected) {
    const BudgetPlan plan = fit(budget);
    EXPECT_EQ(plan.rungs.back().what, what) << budget;
    EXPECT_EQ(plan.rungs.front().what, "as asked");
    EXPECT_EQ(plan.rungs.front().nbytes, 257);
    EXPECT_EQ(plan.rungs.front().step_ms, 91);
    for (std::size_t i = 1; i < plan.rungs.size(); ++i) {
      EXPECT_LE(plan.rungs[i].nbytes, budget);
      EXPECT_GE(plan.rungs[i].step_ms, plan.rungs.back().step_ms);
    }
    EXPECT_TRUE(plan.remark.empty());
  }
  EXPECT_EQ(fit(247).rungs.back().step_ms, 92);
  // An eighth of a part after the other, where all else is given up: 5 bytes each.
  const BudgetPlan part = fit(120);
  EXPECT_EQ(part.rungs.back().nbytes, 117);
  EXPECT_EQ(part.rungs.back().step_ms, 110 + 60.0 * 2 / 8);
}

// Gathers after a unit's backward are refused where none is ahead.
TEST(BudgetSearch, WhatGathersNothingAheadCanBeRun) {
  TrainConfig asked = base(2);
  asked.parallel.prefetch = asked.parallel.reductions_in_flight = 1;
  asked.parallel.backward_prefetch = shard::BackwardPrefetch::kPost;
  const TrainConfig ahead = fit_budget(asked, 220, 10, by_hand).config;
  EXPECT_EQ(ahead.parallel.prefetch, 1);
  EXPECT_EQ(ahead.parallel.backward_prefetch, shard::BackwardPrefetch::kPost);
  const BudgetPlan none = fit_budget(asked, 132, 10, by_hand);
  EXPECT_EQ(none.config.parallel.prefetch, 0);
  EXPECT_NO_THROW(none.config.parallel.validate(DeviceChoice::kCpu));
  EXPECT_TRUE(testing::has(none.rungs.back().what, {"parallel.backward_prefetch=pre"}));
}

TEST(BudgetSearch, TakesSmallerMicroBatchesBeforeItRefuses) {
  TrainConfig asked = base(2);
  asked.parallel.prefetch = asked.parallel.reductions_in_flight = 0;
  asked.train.batch = 6;
  asked.train.accum = 2;
  // Nothing can be recomputed: 600 bytes of activations, 300, 200 or 100.
  const auto fit = [&](std::int64_t nbytes) { return fit_budget(asked, nbytes, 0, by_hand); };
  EXPECT_EQ(fit(607).config.train.batch, 6);
  EXPECT_TRUE(fit(607).remark.empty());
  for (const auto& [budget, batch] : {std::pair(606, 3), {307, 3}, {306, 2}, {206, 1}, {107, 1}}) {
    const BudgetPlan plan = fit(budget);
    EXPECT_EQ(plan.config.train.batch, batch) << budget;
    EXPECT_EQ(plan.config.train.accum, 12 / batch) << budget;
    EXPECT_TRUE(testing::has(plan.remark,
                             {fmt::format("train.batch={} with train.accum={}", batch, 12 / batch),
                              "the same samples", "rounded otherwise"}));
    EXPECT_TRUE(testing::has(plan.rungs.back().what, {fmt::format("train.batch={}", batch)}));
    EXPECT_EQ(plan.rungs.front().what, "as asked");
    EXPECT_EQ(plan.rungs.front().nbytes, 727);
  }
  const auto error = testing::error_of<engine::InvalidArgument>([&] { fit(106); });
  EXPECT_TRUE(testing::has(error, {"within 106 bytes", "the smallest budget that fits is 107 bytes",
                                   "train.batch=1, train.accum=12", "as asked", "727 B"}))
      << error;
}

// What is said to fit does.
TEST(BudgetSearch, TheSmallestBudgetFits) {
  for (const char* strategy : {"zero3", "ddp", "shard_grad_op", "hsdp"}) {
    TrainConfig asked = base(4);
    asked.parallel.strategy = strategy;
    asked.precision.param = engine::DType::kBF16;
    asked.offload.threads = 2;
    asked.train.batch = 2;
    Plans plans({});
    const std::string error = testing::error_of<engine::InvalidArgument>(
        [&] { fit_budget(asked, 1000, kModel.layers, plans.all()); });
    const std::string before = "the smallest budget that fits is ";
    const std::size_t at = error.find(before);
    ASSERT_NE(at, std::string::npos) << error;
    std::string digits = error.substr(at + before.size());
    digits = digits.substr(0, digits.find(' '));
    std::erase(digits, ',');
    const std::int64_t nbytes = std::stoll(digits);
    const BudgetPlan least = fit_budget(asked, nbytes, kModel.layers, plans.all());
    EXPECT_LE(plans.point(least.config).nbytes, nbytes) << strategy;
    EXPECT_THROW(fit_budget(asked, nbytes - 1, kModel.layers, plans.all()), engine::InvalidArgument)
        << strategy;
  }
}

// The rank that is looked at needs less than another.
TEST(BudgetSearch, ChecksWhatItChoosesOnAllRanks) {
  TrainConfig asked = base(2);
  int num_most = 0;
  const auto most = [&](const TrainConfig& c) {
    ++num_most;
    TrainPlan plan = by_hand(c);
    plan.between_steps_nbytes += 8;
    return plan;
  };
  const BudgetPlan plan = fit_budget(asked, 230, 10, most, by_hand);
  EXPECT_EQ(plan.rungs.back().what, "train.recompute=4");
  EXPECT_EQ(plan.rungs.back().nbytes, 225);
  EXPECT_LE(num_most, 5) << "what is asked for, and what is chosen";
}

TEST(BudgetSearch, OfALargeModelCostsFewPlans) {
  TransformerConfig config;
  static_cast<TrainConfig&>(config) = base(64);
  config.train.batch = 1;
  config.precision.param = engine::DType::kBF16;
  Gpt model(gpt_preset("gpt2-xl"));
  config.model.preset = "gpt2-xl";
  const std::int64_t asked =
      peak_nbytes(plan_transformer(config, config, model, {.num_ranks = 64}));
  config.memory_budget = std::to_string(asked / 2);
  const BudgetPlan plan = fit_transformer(config, model, {.num_ranks = 64});
  EXPECT_LE(plan.rungs.back().nbytes, asked / 2);
  EXPECT_LE(plan.num_plans, 150);
}

}  // namespace
}  // namespace tessera::tools
