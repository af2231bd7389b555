// Learning rates by hand, and what the engine is told of a configuration.
#include "tools/config/train_config.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/meta.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/data/token_dataset.h"
#include "tools/machine/limits.h"
#include "tools/models/family.h"
#include "tools/programs/transformer_config.h"

namespace tessera::tools {
namespace {

using engine::DType;
using testing::error_of;
using testing::has;

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

// Units of a thousand, as of links and memory elsewhere.
TEST(TrainConfig, RatesAreTakenInTheirUnits) {
  TrainConfig c;
  FlagSet flags("train", "");
  c.add_to(flags);
  std::ostringstream out;
  ASSERT_TRUE(flags.parse(
      std::vector<const char*>{"--rates.gflops=3", "--rates.memory_gbs=5", "--rates.link_gbs=7",
                               "--rates.link_latency_us=11", "--rates.host_link_gbs=13",
                               "--rates.host_memory_gbs=17"},
      out));
  const engine::MetaRates rates = c.rates.rates(/*on_gpus=*/true, engine::DType::kBF16);
  EXPECT_DOUBLE_EQ(rates.flops_per_s, 3e9);
  EXPECT_DOUBLE_EQ(rates.bytes_per_s, 5e9);
  EXPECT_DOUBLE_EQ(rates.link_bytes_per_s, 7e9);
  EXPECT_DOUBLE_EQ(rates.link_latency_s, 11e-6);
  EXPECT_DOUBLE_EQ(rates.host_link_bytes_per_s, 13e9);
  EXPECT_DOUBLE_EQ(rates.host_bytes_per_s, 17e9);
}

TEST(TrainConfig, EveryFlagSetsItsOwnField) {
  TrainConfig c;
  FlagSet flags("train", "");
  c.add_to(flags);
  std::ostringstream out;
  // Other values than the defaults, and other than each other's.
  ASSERT_TRUE(flags.parse(std::vector<const char*>{"--device=cuda",
                                                   "--parallel.ranks=3",
                                                   "--parallel.backend=nccl",
                                                   "--parallel.canonical",
                                                   "--parallel.strategy=ddp",
                                                   "--parallel.prefetch=4",
                                                   "--parallel.backward_prefetch=post",
                                                   "--parallel.reshard_after_forward=false",
                                                   "--parallel.unit_min_numel=5",
                                                   "--parallel.bucket_mb=2.5",
                                                   "--parallel.deadline_s=6.5",
                                                   "--precision.param=bf16",
                                                   "--offload.parameters=0.25",
                                                   "--offload.gradients=0.5",
                                                   "--offload.optimizer=0.75",
                                                   "--offload.threads=22",
                                                   "--train.steps=7",
                                                   "--train.batch=8",
                                                   "--train.accum=9",
                                                   "--train.accum_comm=last",
                                                   "--train.seed=10",
                                                   "--train.optimizer=sgd",
                                                   "--train.lr=0.11",
                                                   "--train.momentum=0.12",
                                                   "--train.weight_decay=0.13",
                                                   "--train.beta1=0.14",
                                                   "--train.beta2=0.15",
                                                   "--train.eps=0.16",
                                                   "--train.overlap_optimizer=backward",
                                                   "--train.grad_clip=0.17",
                                                   "--train.max_skips=21",
                                                   "--train.check_gradients",
                                                   "--train.warmup=18",
                                                   "--train.schedule=linear",
                                                   "--train.recompute",
                                                   "--log.every=19",
                                                   "--log.val_every=20",
                                                   "--log.peak_ms=23",
                                                   "--log.jsonl=lines",
                                                   "--out=folder"},
                          out));
  EXPECT_EQ(c.device, DeviceChoice::kCuda);
  EXPECT_EQ(c.parallel.ranks, 3);
  EXPECT_EQ(c.parallel.backend, BackendChoice::kNccl);
  EXPECT_TRUE(c.parallel.canonical);
  EXPECT_EQ(c.parallel.strategy, "ddp");
  EXPECT_EQ(c.parallel.prefetch, 4);
  EXPECT_EQ(c.parallel.backward_prefetch, shard::BackwardPrefetch::kPost);
  EXPECT_EQ(c.parallel.reshard_after_forward, "false");
  EXPECT_EQ(c.parallel.unit_min_numel, 5);
  EXPECT_EQ(c.parallel.bucket_mb, 2.5);
  EXPECT_EQ(c.parallel.deadline_s, 6.5);
  EXPECT_EQ(c.precision, shard::Precision{.param = DType::kBF16});
  EXPECT_EQ(c.offload.parameters, 0.25);
  EXPECT_EQ(c.offload.gradients, 0.5);
  EXPECT_EQ(c.offload.optimizer, 0.75);
  EXPECT_EQ(c.offload.threads, 22);
  EXPECT_EQ(c.train.steps, 7);
  EXPECT_EQ(c.train.batch, 8);
  EXPECT_EQ(c.train.accum, 9);
  EXPECT_EQ(c.train.accum_comm, AccumComm::kLast);
  EXPECT_EQ(c.train.seed, 10);
  EXPECT_EQ(c.train.optimizer, OptimizerKind::kSgd);
  EXPECT_EQ(c.train.lr, 0.11);
  EXPECT_EQ(c.train.momentum, 0.12);
  EXPECT_EQ(c.train.weight_decay, 0.13);
  EXPECT_EQ(c.train.beta1, 0.14);
  EXPECT_EQ(c.train.beta2, 0.15);
  EXPECT_EQ(c.train.eps, 0.16);
  EXPECT_EQ(c.train.overlap_optimizer, OverlapOptimizer::kBackward);
  EXPECT_EQ(c.train.grad_clip, 0.17);
  EXPECT_EQ(c.train.max_skips, 21);
  EXPECT_TRUE(c.train.check_gradients);
  EXPECT_EQ(c.train.warmup, 18);
  EXPECT_EQ(c.train.schedule, ScheduleKind::kLinear);
  EXPECT_EQ(c.train.recompute, Recompute(true));
  EXPECT_EQ(c.log.every, 19);
  EXPECT_EQ(c.log.val_every, 20);
  EXPECT_EQ(c.log.peak_ms, 23);
  EXPECT_EQ(c.log.jsonl, "lines");
  EXPECT_EQ(c.out, "folder");
}

TEST(TrainConfig, PrecisionsAreFlagsOfTheirOwn) {
  const std::pair<const char*, shard::Precision> cases[] = {
      {"--precision.param=bf16", {.param = DType::kBF16}},
      {"--precision.reduce=bf16", {.reduce = DType::kBF16}},
      {"--precision.accumulate=bf16", {.accumulate = DType::kBF16}},
  };
  for (const auto& [flag, expected] : cases) {
    TrainConfig c;
    FlagSet flags("train", "");
    c.add_to(flags);
    std::ostringstream out;
    ASSERT_TRUE(flags.parse(std::vector<const char*>{flag}, out));
    EXPECT_EQ(c.precision, expected) << flag;
  }
  // Its range would need loss scaling.
  for (const std::string name : {"precision.param", "precision.reduce", "precision.accumulate"}) {
    TrainConfig c;
    FlagSet flags("train", "");
    c.add_to(flags);
    std::ostringstream out;
    const std::string flag = "--" + name + "=f16";
    EXPECT_TRUE(has(error_of<engine::InvalidArgument>(
                        [&] { flags.parse(std::vector<const char*>{flag.c_str()}, out); }),
                    {"expected one of f32, bf16, got \"f16\"", "(--" + name + ")"}));
  }
}

TEST(TrainConfig, EveryChoiceHasItsName) {
  const auto parsed = [](const std::string& flag) {
    TrainConfig c;
    FlagSet flags("train", "");
    c.add_to(flags);
    std::ostringstream out;
    EXPECT_TRUE(flags.parse(std::vector<const char*>{flag.c_str()}, out));
    return c;
  };
  EXPECT_EQ(parsed("--train.schedule=constant").train.schedule, ScheduleKind::kConstant);
  EXPECT_EQ(parsed("--train.schedule=cosine").train.schedule, ScheduleKind::kCosine);
  EXPECT_EQ(parsed("--train.optimizer=adamw").train.optimizer, OptimizerKind::kAdamW);
  EXPECT_EQ(parsed("--train.accum_comm=every").train.accum_comm, AccumComm::kEvery);
  EXPECT_EQ(parsed("--train.overlap_optimizer=none").train.overlap_optimizer,
            OverlapOptimizer::kNone);
  EXPECT_EQ(parsed("--train.overlap_optimizer=interleaved").train.overlap_optimizer,
            OverlapOptimizer::kInterleaved);
  EXPECT_EQ(parsed("--device=auto").device, DeviceChoice::kAuto);
  EXPECT_EQ(parsed("--device=cpu").device, DeviceChoice::kCpu);
  EXPECT_EQ(parsed("--parallel.backend=auto").parallel.backend, BackendChoice::kAuto);
  EXPECT_EQ(parsed("--parallel.backend=threads").parallel.backend, BackendChoice::kThreads);
}

TEST(TrainConfig, TellsTheEngineWhatWasAskedFor) {
  TrainConfig config;
  const shard::FsdpOptions defaults = config.fsdp_options(4);
  EXPECT_TRUE(defaults.placement.reshard_after_forward);
  EXPECT_EQ(defaults.prefetch, 1);
  EXPECT_EQ(defaults.seed, 1337u);
  config.parallel.prefetch = 5;
  config.parallel.backward_prefetch = shard::BackwardPrefetch::kPost;
  config.parallel.unit_min_numel = 77;
  config.parallel.reshard_after_forward = "false";
  config.precision = {.param = DType::kBF16, .reduce = DType::kF32, .accumulate = DType::kBF16};
  config.parallel.reductions_in_flight = 4;
  config.train.seed = 9;
  const shard::FsdpOptions options = config.fsdp_options(4);
  EXPECT_FALSE(options.placement.reshard_after_forward);
  EXPECT_EQ(options.prefetch, 5);
  EXPECT_EQ(options.backward_prefetch, shard::BackwardPrefetch::kPost);
  EXPECT_EQ(options.unit_min_numel, 77);
  EXPECT_EQ(options.precision.param, DType::kBF16);
  EXPECT_EQ(options.precision.reduce, DType::kF32);
  EXPECT_EQ(options.precision.accumulate, DType::kBF16);
  EXPECT_EQ(options.reductions_in_flight, 4);
  EXPECT_EQ(options.seed, 9u);
  config.parallel.strategy = "shard_grad_op";
  config.parallel.reshard_after_forward = "true";
  EXPECT_TRUE(config.fsdp_options(4).placement.reshard_after_forward);
  config.parallel.reshard_after_forward = "auto";
  EXPECT_FALSE(config.fsdp_options(4).placement.reshard_after_forward);
  config.parallel.reshard_after_forward = "2";
  EXPECT_TRUE(config.fsdp_options(4).placement.reshard_after_forward);
  EXPECT_EQ(config.fsdp_options(4).placement.reshard_ranks, 2);
}

TEST(TrainConfig, SkipsAndChecksReachTheEngine) {
  TrainConfig config;
  EXPECT_EQ(config.fsdp_options(2).non_finite, shard::NonFinite::kThrow);
  EXPECT_FALSE(config.fsdp_options(2).check_gradients);
  config.train.max_skips = 1;
  config.train.check_gradients = true;
  EXPECT_EQ(config.fsdp_options(2).non_finite, shard::NonFinite::kSkip);
  EXPECT_TRUE(config.fsdp_options(2).check_gradients);
}

TEST(TrainConfig, OffloadReachesTheEngine) {
  TrainConfig config;
  EXPECT_FALSE(config.fsdp_options(2).offload.any());
  config.offload = {.parameters = 0.25, .gradients = 0.5, .optimizer = 0.75};
  const int cores = read_limits().usable_cores();
  for (const int ranks : {1, 2, 64}) {
    const shard::OffloadOptions offload = config.fsdp_options(ranks).offload;
    EXPECT_EQ(offload.parameters, 0.25);
    EXPECT_EQ(offload.gradients, 0.5);
    EXPECT_EQ(offload.optimizer, 0.75);
    EXPECT_EQ(offload.threads, std::max(1, cores / ranks));
  }
  config.offload.threads = 5;
  EXPECT_EQ(config.fsdp_options(2).offload.threads, 5);
}

TEST(TrainConfig, OffloadHasNoMoreThreadsThanTheProcessHasCores) {
  TrainConfig config;
  config.offload.optimizer = 1;
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  CPU_ZERO(&one);
  CPU_SET(allowed_cores().back(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(config.fsdp_options(1).offload.threads, 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  // Ranks of other processes take none of them.
  const int num_cores = read_limits().usable_cores();
  config.parallel.local_ranks = 1;
  EXPECT_EQ(config.fsdp_options(8 * num_cores).offload.threads, num_cores);
  config.parallel.local_ranks = num_cores;
  EXPECT_EQ(config.fsdp_options(8 * num_cores).offload.threads, 1);
  // A rank that keeps to its cores has no others.
  config.cpu = {.threads_per_rank = 3, .pin = true};
  EXPECT_EQ(config.fsdp_options(1).offload.threads, 3);
}

TEST(TrainConfig, OffloadThatWouldDoNothingIsRefused) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "hfsdp"}) {
    TrainConfig config;
    config.out = "out";
    config.parallel.strategy = strategy;
    config.offload.parameters = 0.5;
    const FlagSet flags("train", "");
    EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { config.validate(flags); }),
                    {"offload.parameters=0", strategy, "f32", "0.5"}));
    config.precision.param = DType::kBF16;
    EXPECT_NO_THROW(config.validate(flags)) << strategy;
  }
  TrainConfig config;
  config.out = "out";
  config.offload.threads = 3;
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { config.validate(FlagSet("train", "")); }),
                  {"offload.threads", "3"}));
}

TEST(TrainConfig, ShardRanksAreTheStrategysUnlessGiven) {
  TrainConfig config;
  EXPECT_EQ(config.fsdp_options(6).placement.shard_ranks, 6);
  config.parallel.strategy = "ddp";
  EXPECT_EQ(config.fsdp_options(6).placement.shard_ranks, 1);
  config.parallel.strategy = "hsdp";
  EXPECT_EQ(config.fsdp_options(6).placement.shard_ranks, 3);
  config.parallel.shard_ranks = 2;
  EXPECT_EQ(config.fsdp_options(6).placement.shard_ranks, 2);
}

TEST(TrainConfig, ShardingThatDoesNotFitIsRefusedWithItsValues) {
  const auto check = [](const char* strategy, std::int64_t shard_ranks, const char* reshard) {
    TrainConfig config;
    config.out = "folder";
    config.parallel.strategy = strategy;
    config.parallel.shard_ranks = shard_ranks;
    config.parallel.reshard_after_forward = reshard;
    config.validate(FlagSet("train", ""));
    static_cast<void>(config.fsdp_options(6));
  };
  const auto error = [&](const char* strategy, std::int64_t shard_ranks, const char* reshard) {
    return error_of<engine::InvalidArgument>([&] { check(strategy, shard_ranks, reshard); });
  };
  EXPECT_NO_THROW(check("hsdp", 3, "3"));
  EXPECT_TRUE(has(error("hsdp", 4, "auto"), {"parallel.shard_ranks", "6 ranks", "got 4"}));
  EXPECT_TRUE(has(error("zero3", 3, "auto"), {"parallel.shard_ranks", "zero3", "got 3"}));
  EXPECT_TRUE(has(error("ddp", 1, "auto"), {"parallel.shard_ranks", "ddp"}));
  EXPECT_TRUE(has(error("zero3", 0, "4"), {"reshard_after_forward", "6", "4"}));
  for (const char* bad : {"0", "-1", "2x", "yes", ""}) {
    EXPECT_TRUE(has(error("zero3", 0, bad),
                    {"parallel.reshard_after_forward", "'" + std::string(bad) + "'"}))
        << bad;
  }
  for (const char* whole : {"ddp", "zero1", "zero2", "hybrid_zero2"}) {
    EXPECT_TRUE(has(error(whole, 0, "true"), {"reshard_after_forward", whole})) << whole;
    EXPECT_NO_THROW(check(whole, 0, "false")) << whole;
  }
}

TEST(TrainConfig, BucketsAreInMebibytesAndNeverRoundedToNone) {
  const auto nbytes = [](double bucket_mb) {
    TrainConfig config;
    config.parallel.strategy = "ddp";
    config.parallel.bucket_mb = bucket_mb;
    return config.fsdp_options(2).bucket_nbytes;
  };
  EXPECT_EQ(nbytes(0), 0);
  EXPECT_EQ(nbytes(25), 25 * 1024 * 1024);
  EXPECT_EQ(nbytes(0.5), 512 * 1024);
  EXPECT_EQ(nbytes(1e-9), 1);
}

TEST(TrainConfig, BucketsThatDoNotFitAreRefusedWithTheirValues) {
  const auto check = [](const std::string& strategy, std::int64_t unit_min_numel) {
    TrainConfig config;
    config.out = "folder";
    config.parallel.strategy = strategy;
    config.parallel.bucket_mb = 2.5;
    config.parallel.unit_min_numel = unit_min_numel;
    config.validate(FlagSet("train", ""));
  };
  for (const std::string& strategy : shard::Placement::preset_names()) {
    if (shard::Placement::preset(strategy).parameters == shard::Place::kWhole) {
      EXPECT_NO_THROW(check(strategy, 0)) << strategy;
      EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { check(strategy, 7); }),
                      {"parallel.bucket_mb", "parallel.unit_min_numel", "got 2.5 and 7"}));
    } else {
      EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { check(strategy, 0); }),
                      {"parallel.bucket_mb", "got 2.5", "parallel.strategy=" + strategy}));
    }
  }
}

TEST(TrainConfig, PostBackwardPrefetchIsRefusedWhereNothingIsGatheredAhead) {
  for (const auto& [prefetch, strategy] : {std::pair{0, "zero3"}, {1, "ddp"}, {1, "zero2"}}) {
    TrainConfig config;
    config.out = "out";
    config.parallel.prefetch = prefetch;
    config.parallel.strategy = strategy;
    FlagSet flags("train", "");
    config.validate(flags);
    config.parallel.backward_prefetch = shard::BackwardPrefetch::kPost;
    EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { config.validate(flags); }),
                    {"parallel.backward_prefetch=post", strategy}));
  }
}

TEST(TrainConfig, UpdatesDuringBackwardAreRefusedWithClippingAndSkips) {
  TrainConfig config;
  config.out = "out";
  config.train.overlap_optimizer = OverlapOptimizer::kInterleaved;
  FlagSet flags("train", "");
  const std::string message = error_of<engine::InvalidArgument>([&] { config.validate(flags); });
  EXPECT_TRUE(has(message, {"train.grad_clip=0", "train.overlap_optimizer", "got 1"}));
  config.train.grad_clip = 0;
  config.validate(flags);
  config.train.max_skips = 3;
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { config.validate(flags); }),
                  {"train.max_skips=0", "got 3"}));
}

TEST(TrainConfig, ADeadlineIsNeverRoundedToNothing) {
  TrainConfig config;
  EXPECT_EQ(config.deadline().count(), 300'000);
  config.parallel.deadline_s = 0.25;
  EXPECT_EQ(config.deadline().count(), 250);
  config.parallel.deadline_s = 1e-6;
  EXPECT_EQ(config.deadline().count(), 1);
}

// A model that is started from may have more positions than sequences are to have tokens.
TEST(TransformerConfig, SequencesAreAsLongAsAskedAndInTheOrderOfTheSeed) {
  const testing::TempFolder folder;
  TransformerConfig config;
  std::string text;
  for (int i = 0; i < 100; ++i) text += static_cast<char>(i + 1);
  config.data.path = folder.write("text.txt", text);
  config.data.val_fraction = 0;
  ModelConfig model = preset_config("small");
  model.seq = 32;
  EXPECT_EQ(config.dataset(model).seq(), 32);
  config.model.seq = 8;
  EXPECT_EQ(config.dataset(model).seq(), 8);
  EXPECT_EQ(config.dataset(model).num_sequences(), 12);
  const auto tokens_of = [&](std::int64_t seed) {
    config.train.seed = seed;
    std::vector<std::int32_t> tokens(12 * 8), targets(12 * 8);
    config.dataset(model).batch(0, 12, tokens, targets);
    return tokens;
  };
  EXPECT_EQ(tokens_of(1), tokens_of(1));
  EXPECT_NE(tokens_of(1), tokens_of(2));
}

}  // namespace
}  // namespace tessera::tools
