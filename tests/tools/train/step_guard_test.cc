// Steps that are made again: what a machine that fails for a moment costs, and what is wrong for
// good.
#include "tools/train/step_guard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "shard/fsdp.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/mlp_run.h"
#include "tools/models/mlp.h"

namespace tessera::tools {
namespace {

using testing::has;
using testing::TempFolder;

StepOutcome of(float loss, float gradient = 1) { return {1, {loss, gradient, 0, 0, 0}, ""}; }

/// Judges steps with these losses, none of which is to be replayed.
void learn(StepGuard& guard, int n, float loss) {
  for (int i = 0; i < n; ++i) {
    const auto verdict =
        guard.judge(i + 1, of(loss), [] { return ADD_FAILURE() << "a replay", of(0); });
    EXPECT_FALSE(verdict.is_replayed);
  }
}

TEST(StepGuard, ASpikeIsOneAgainstTheMedianOfEnoughSteps) {
  const StepConfig config{.spike_factor = 3};
  StepGuard early(config);
  learn(early, 7, 2);
  learn(early, 1, 100);  // of seven nobody knows what is usual
  StepGuard guard(config);
  learn(guard, 20, 2);
  learn(guard, 1, 6);
  int num_replays = 0;
  const auto again = [&](float loss) {
    return [&num_replays, loss] { return ++num_replays, of(loss); };
  };
  const auto same = guard.judge(22, of(6.5f), again(6.5f));
  EXPECT_EQ(num_replays, 1);
  EXPECT_TRUE(
      has(same.is_wrong, {"the loss is 6.5, over 3 times the median of the last 21", ", 2"}));
  const auto healed = guard.judge(22, of(6.5f), again(2));
  EXPECT_EQ(num_replays, 3);
  EXPECT_EQ(healed.is_wrong, "");
  EXPECT_EQ(healed.outcome.mean_loss(), 2);
  EXPECT_TRUE(has(healed.remark, {"on rank 0 (loss 6.5, then 2, then 2)", "a transient fault"}));
  // From the ninth step on, and of no more than 32.
  StepGuard first(config), long_run(config);
  learn(first, 8, 2);
  EXPECT_TRUE(first.judge(9, of(7), again(7)).is_replayed);
  learn(long_run, 40, 2);
  EXPECT_TRUE(has(long_run.judge(41, of(7), again(7)).is_wrong, {"of the last 32 steps, 2"}));
}

// Where losses are sums, of more terms in one step than in another.
TEST(StepGuard, ASumIsMeasuredAsTheMeanThatItIs) {
  const StepConfig config{.spike_factor = 3};
  StepGuard guard(config);
  learn(guard, 20, 2);
  StepOutcome sum = of(200);
  sum.num_loss_terms = 100;
  EXPECT_EQ(sum.mean_loss(), 2);
  EXPECT_FALSE(guard.doubts(21, sum));
  sum.num_loss_terms = 10;
  EXPECT_TRUE(guard.doubts(21, sum));
}

TEST(StepGuard, OfThreeResultsTwoMustAgree) {
  const StepConfig config{.verify_every = 5};
  StepGuard guard(config);
  EXPECT_TRUE(guard.watches(5));
  EXPECT_FALSE(guard.watches(6));
  std::vector<StepOutcome> next = {of(2, 1)};
  const auto replay = [&] {
    const StepOutcome outcome = next.front();
    next.erase(next.begin());
    return outcome;
  };
  EXPECT_EQ(guard.judge(5, of(2, 1), replay).remark, "");
  next = {of(2, 7), of(2, 1)};  // the second was wrong, in the gradient alone
  const auto second = guard.judge(10, of(2, 1), replay);
  EXPECT_TRUE(has(second.remark, {"a transient fault"}));
  EXPECT_EQ(second.is_wrong, "");
  next = {of(2, 7), of(2, 8)};
  EXPECT_TRUE(has(guard.judge(15, of(2, 1), replay).is_wrong,
                  {"three results, first to another gradient of any"}));
  // Equal but for their bits: 0 and -0, NaN and NaN.
  next = {of(-0.0f), of(-0.0f)};
  EXPECT_NE(guard.judge(20, of(0.0f), replay).remark, "");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  next = {of(nan)};
  EXPECT_TRUE(has(guard.judge(25, of(nan), replay).is_wrong, {"the loss is nan"}));
  // The rank that differs.
  StepOutcome two{2, {1, 0, 0, 0, 0, 1, 0, 0, 0, 0}, ""}, other = two;
  EXPECT_EQ(two.difference(other), "");
  other.values[7] = 5;
  EXPECT_EQ(two.difference(other), "gradient of any rank, seen in the sums of rank 1");
  other.values[5] = 7;
  EXPECT_EQ(two.difference(other), "loss on rank 1");
}

TEST(StepGuard, ParametersThatNobodyWroteStayAndAreCopies) {
  const StepConfig config{.verify_every = 5};
  const StepOutcome whole{4, std::vector<float>(20), "", 2};
  StepOutcome changed = whole, copied = whole, parts = whole;
  for (const std::size_t rank : {0, 2}) parts.values[5 * rank + 4] = 3;  // of shard 0
  EXPECT_EQ(parts.damage(parts), "");
  changed.values[18] = 1;
  EXPECT_TRUE(has(parts.damage(whole), {"of rank 0 have changed"}));
  EXPECT_TRUE(has(changed.damage(changed), {"of ranks 1 and 3 differ"}));
  changed.copies_apart = 0;
  EXPECT_EQ(changed.damage(changed), "");
  // However often the same comes of it.
  StepGuard guard(config);
  StepOutcome wrong = changed;
  wrong.values[0] = 9;
  const auto verdict = guard.judge(5, whole, [&] { return wrong; });
  EXPECT_TRUE(verdict.is_damaged);
  EXPECT_TRUE(has(verdict.is_wrong, {"rank 3 have changed while nobody wrote them"}));
}

TEST(StepGuard, ChecksumsAreOfFrozenParametersToo) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    Mlp mlp({.inputs = 6, .hidden = 8, .layers = 2, .classes = 3});
    engine::Parameter& frozen = *mlp.blocks().front()->parameters.front();
    frozen.trainable = false;
    shard::Fsdp fsdp(world, engine::Memory(), engine::Stream::inline_cpu("compute"), mlp.blocks(),
                     mlp.root(), {});
    const auto bits = [&] {
      std::vector<std::uint32_t> all;
      for (const float x : checksums_of(fsdp)) all.push_back(std::bit_cast<std::uint32_t>(x));
      return std::pair(std::vector(all.begin(), all.end() - 2),
                       std::vector(all.end() - 2, all.end()));
    };
    const auto before = bits();
    std::vector<float> values = fsdp.full_parameter(frozen);
    values.back() = std::nextafter(values.back(), 9.0f);
    fsdp.load(frozen, values);
    fsdp.parameters_changed();
    const auto after = bits();
    EXPECT_EQ(before.first, after.first) << "of gradients";
    EXPECT_NE(before.second, after.second) << "of parameters";
  });
}

using Fault = decltype(testing::MlpTraining::fault);
using Damage = decltype(testing::MlpTraining::damage);

using Trained = testing::MlpTrained;

Trained train(const TempFolder& folder, const StepConfig& step, const Fault& fault,
              bool resume = false, const std::string& strategy = "zero3",
              const Damage& damage = {}) {
  return testing::train_mlp(
      folder, {.step = step,
               .change = [&](TrainConfig& config) { config.parallel.strategy = strategy; },
               .resumes = resume,
               .fault = fault,
               .damage = damage});
}

float healthy(std::int64_t, int, int, float loss) { return loss; }

TEST(StepGuard, ATrainingWithATransientFaultEndsWithTheBitsOfOneWithout) {
  const TempFolder a, b, c;
  const StepConfig plain{.steps = 14}, guarded{.steps = 14, .spike_factor = 4, .verify_every = 5};
  const Trained expected = train(a, plain, healthy);
  EXPECT_EQ(expected.error, "");
  const Trained verified = train(b, guarded, healthy);
  EXPECT_EQ(verified.sha, expected.sha);
  for (const StepRecord& step : verified.steps) {
    EXPECT_EQ(step.replayed, step.step % 5 == 0 ? "equal" : "") << step.step;
  }
  // A spike of step 12 on rank 1, once; an infinity of step 2, once.
  const Trained faulty =
      train(c, guarded, [](std::int64_t step, int rank, int attempt, float loss) {
        if (step == 11 && rank == 1 && attempt == 0) return loss * 100;
        return step == 1 && rank == 0 && attempt == 0 ? std::numeric_limits<float>::infinity()
                                                      : loss;
      });
  EXPECT_EQ(faulty.error, "");
  EXPECT_EQ(faulty.sha, expected.sha);
  EXPECT_TRUE(has(faulty.steps[11].replayed, {"rank 1", "transient"}));
  EXPECT_TRUE(has(faulty.steps[1].replayed, {"rank 0", "transient"}));
  EXPECT_LT(faulty.steps[11].loss, 4);  // what is logged is what was believed
}

TEST(StepGuard, WhatIsWrongAgainEndsTheTrainingWithTheStateBeforeIt) {
  const TempFolder whole, broken;
  const StepConfig guarded{.steps = 14, .spike_factor = 4};
  const Trained expected = train(whole, guarded, healthy);
  const Fault spike = [](std::int64_t step, int, int, float loss) {
    return step == 11 ? loss * 100 : loss;
  };
  const Trained run = train(broken, guarded, spike);
  EXPECT_TRUE(has(run.error, {"over 4 times the median", "made again from the same state as well",
                              "(step 12; the state before it is in ", "/step_11"}));
  EXPECT_EQ(run.steps.size(), 11u);
  const Trained next = train(broken, guarded, healthy, /*resume=*/true);
  EXPECT_EQ(next.resumed.step, 11);
  EXPECT_EQ(next.sha, expected.sha);
}

// Weights that are not a number from forward to backward: the loss is finite, and the gradient of
// the layer before them is not.
TEST(StepGuard, AGradientThatIsNotFiniteOnceIsMadeAgainWhereNoUpdateMayBeSkipped) {
  const TempFolder a, b, c;
  const StepConfig guarded{.steps = 5, .spike_factor = 4};
  ASSERT_EQ(guarded.max_skips, 0);
  const Trained expected = train(a, guarded, healthy);
  EXPECT_EQ(expected.error, "");
  const auto poison = [](int last_attempt) {
    return [last_attempt](std::int64_t step, int rank, int attempt, Mlp& mlp) {
      if (step != 2 || rank != 1 || attempt > last_attempt) return;
      const engine::Parameter& weight = *mlp.blocks().at(1)->parameters.front();
      *weight.value.data<float>() = std::numeric_limits<float>::quiet_NaN();
    };
  };
  const Trained once = train(b, guarded, healthy, false, "shard_grad_op", poison(0));
  EXPECT_EQ(once.error, "");
  EXPECT_EQ(once.sha, expected.sha);
  EXPECT_TRUE(has(once.steps.at(2).replayed, {"it came to another ", "a transient fault"}));
  // Each time: told with what is not finite.
  const Trained always = train(c, guarded, healthy, false, "shard_grad_op", poison(9));
  EXPECT_TRUE(has(always.error, {"the gradient is not finite (", "made again from the same state",
                                 "(step 3; the state before it is in "}))
      << always.error;
}

// A bit of weights that lie on rank 1 for the passes of a step flips between forward and backward.
TEST(StepGuard, AFlippedBitOfGatheredWeightsIsFoundInAStepThatIsVerified) {
  for (const char* strategy : {"zero3", "shard_grad_op", "zero2", "zero1", "hsdp", "ddp"}) {
    const TempFolder whole, broken;
    const StepConfig verified{.steps = 7, .verify_every = 5};
    const Trained expected = train(whole, verified, healthy, false, strategy);
    EXPECT_EQ(expected.error, "");
    int num_flips = 0;
    const Damage flip = [&](std::int64_t step, int rank, int, Mlp& mlp) {
      if (step != 4 || rank != 1 || num_flips > 0) return;
      // The first layer that has one before it, and has not been released.
      const std::vector<engine::Block*> blocks = mlp.blocks();
      for (auto block = blocks.begin() + 1; block != blocks.end(); ++block) {
        const engine::Parameter& weight = *(*block)->parameters.front();
        if (!weight.value.buffer()->resident()) continue;
        ++num_flips;
        std::byte* const exponent = weight.value.raw() + 3;
        *exponent ^= std::byte{1};
        return;
      }
    };
    const Trained run = train(broken, verified, healthy, false, strategy, flip);
    EXPECT_EQ(num_flips, 1) << strategy;
    if (std::string(strategy) == "ddp") {
      // What is computed with is all there is.
      EXPECT_TRUE(has(run.error, {"the parameters of ranks 0 and 1 differ", "(step 5)"}));
      EXPECT_EQ(run.steps.size(), 4u);
      continue;
    }
    EXPECT_EQ(run.error, "") << strategy;
    EXPECT_EQ(run.sha, expected.sha) << strategy;
    EXPECT_TRUE(has(run.steps.at(4).replayed, {"it came to another ", "a transient fault"}))
        << strategy;
  }
}

}  // namespace
}  // namespace tessera::tools
