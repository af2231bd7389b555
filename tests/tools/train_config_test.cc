// Learning rates by hand, and what the engine is told of a configuration.
#include "tools/train_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

namespace tessera::tools {
namespace {

using engine::DType;

constexpr double kLr = 0.8;

StepConfig config_of(ScheduleKind schedule, std::int64_t warmup, std::int64_t steps) {
  StepConfig config;
  config.lr = kLr;
  config.schedule = schedule;
  config.warmup = warmup;
  config.steps = steps;
  return config;
}

void expect_lrs(const StepConfig& config, const std::vector<double>& expected) {
  for (std::size_t step = 0; step < expected.size(); ++step) {
    EXPECT_NEAR(config.lr_at(static_cast<std::int64_t>(step)), expected[step], 1e-15)
        << "step " << step << " of " << config.steps << ", warmup " << config.warmup;
  }
}

TEST(LearningRate, ConstantStaysFromTheFirstStepToTheLast) {
  expect_lrs(config_of(ScheduleKind::kConstant, 0, 5), {0.8, 0.8, 0.8, 0.8, 0.8});
  expect_lrs(config_of(ScheduleKind::kConstant, 4, 8), {0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8});
}

TEST(LearningRate, LinearFallsEvenlyTowardsZeroAtTheEnd) {
  expect_lrs(config_of(ScheduleKind::kLinear, 0, 8), {0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0});
  expect_lrs(config_of(ScheduleKind::kLinear, 4, 8), {0.2, 0.4, 0.6, 0.8, 0.8, 0.6, 0.4, 0.2, 0});
}

TEST(LearningRate, CosineFallsAsHalfAWave) {
  const double third = 0.4 * (1 + std::cos(std::numbers::pi / 4));  // 0.683
  const double last = 0.4 * (1 - std::cos(std::numbers::pi / 4));   // 0.117
  expect_lrs(config_of(ScheduleKind::kCosine, 0, 6),
             {0.8, 0.4 * (1 + std::sqrt(0.75)), 0.6, 0.4, 0.2, 0.4 * (1 - std::sqrt(0.75)), 0});
  expect_lrs(config_of(ScheduleKind::kCosine, 2, 6), {0.4, 0.8, 0.8, third, 0.4, last, 0});
}

TEST(LearningRate, WarmupRisesEvenlyAndReachesThePeakInItsLastStep) {
  for (const auto schedule :
       {ScheduleKind::kConstant, ScheduleKind::kCosine, ScheduleKind::kLinear}) {
    expect_lrs(config_of(schedule, 1, 3), {0.8, 0.8});
    // Training that ends during the warmup.
    expect_lrs(config_of(schedule, 8, 4), {0.1, 0.2, 0.3, 0.4});
    expect_lrs(config_of(schedule, 4, 4), {0.2, 0.4, 0.6, 0.8});
  }
}

TEST(TrainConfig, TellsTheEngineWhatWasAskedFor) {
  TrainConfig config;
  const shard::FsdpOptions defaults = config.fsdp_options();
  EXPECT_TRUE(defaults.placement.reshard_after_forward);
  EXPECT_EQ(defaults.prefetch, 1);
  EXPECT_EQ(defaults.seed, 1337u);
  config.parallel.prefetch = 5;
  config.parallel.unit_min_numel = 77;
  config.parallel.reshard_after_forward = "false";
  config.precision = {.param = DType::kBF16, .reduce = DType::kF32, .accumulate = DType::kBF16};
  config.train.accum_comm = shard::Communicate::kLastMicroStep;
  config.train.seed = 9;
  const shard::FsdpOptions options = config.fsdp_options();
  EXPECT_FALSE(options.placement.reshard_after_forward);
  EXPECT_EQ(options.prefetch, 5);
  EXPECT_EQ(options.unit_min_numel, 77);
  EXPECT_EQ(options.precision.param, DType::kBF16);
  EXPECT_EQ(options.precision.reduce, DType::kF32);
  EXPECT_EQ(options.precision.accumulate, DType::kBF16);
  EXPECT_EQ(options.communicate, shard::Communicate::kLastMicroStep);
  EXPECT_EQ(options.seed, 9u);
  config.parallel.strategy = "shard_grad_op";
  config.parallel.reshard_after_forward = "true";
  EXPECT_TRUE(config.fsdp_options().placement.reshard_after_forward);
  config.parallel.reshard_after_forward = "auto";
  EXPECT_FALSE(config.fsdp_options().placement.reshard_after_forward);
}

TEST(TrainConfig, ADeadlineIsNeverRoundedToNothing) {
  TrainConfig config;
  EXPECT_EQ(config.deadline().count(), 300'000);
  config.parallel.deadline_s = 0.25;
  EXPECT_EQ(config.deadline().count(), 250);
  config.parallel.deadline_s = 1e-6;
  EXPECT_EQ(config.deadline().count(), 1);
}

}  // namespace
}  // namespace tessera::tools
