// The promise of the engine: how training is distributed does not change a bit of what it computes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/testing/covering.h"
#include "tests/tools/testing/gpt_run.h"

namespace tessera::tools {
namespace {

using engine::DType;
using testing::GptRun;
using testing::run_gpt;
using testing::TempFolder;

/// What changes the numbers. Runs of one case must all leave the same bits.
struct Case {
  const char* name;
  std::array<std::pair<std::int64_t, std::int64_t>, 4> ranks_accum;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  shard::Precision precision = {};
  AccumComm accum_comm = AccumComm::kEvery;
  int number = 0;         // of the case: which strategies meet which options
  bool overlaps = false;  // updates with backward, which leaves no norm to clip by
  const char* hook = "none";
  bool across_replicas = false;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// Sizes that neither vectors, heads of a power of two nor any number of ranks divide.
constexpr GptConfig kModel = {
    .layers = 3, .heads = 3, .dim = 39, .seq = 17, .vocab = 307, .dropout = 0.1};

/// Tokens that training can learn: few are common, and each predicts the next most of the time.
const TokenDataset& tokens() {
  static const TokenDataset data = [] {
    std::string bytes;
    const engine::RandomStream random{7, 0};
    std::uint32_t token = 1;
    for (std::uint64_t i = 0; i < 4000; ++i) {
      token = random.uniform(i) < 0.7f ? (token * 5 + 17) % 37 : (token * 31 + 101) % 307;
      bytes += static_cast<char>(token & 0xff);
      bytes += static_cast<char>(token >> 8);
    }
    const TempFolder folder;
    return TokenDataset(
        TokenFile(folder.write("tokens.bin", bytes)),
        {.seq = kModel.seq, .vocab = kModel.vocab, .order = SampleOrder::kShuffle, .seed = 3});
  }();
  return data;
}

/// The loss of a model that knows how common each token is, and nothing else.
double entropy_of_tokens() {
  const std::int64_t n = tokens().num_sequences();
  const auto numel = static_cast<std::size_t>(n * kModel.seq);
  std::vector<std::int32_t> all(numel), targets(numel);
  tokens().batch(0, n, all, targets);
  std::map<std::int32_t, double> counts;
  for (const std::int32_t token : targets) ++counts[token];
  double entropy = 0;
  for (const auto& [token, count] : counts) {
    const double share = count / static_cast<double>(numel);
    entropy -= share * std::log(share);
  }
  return entropy;
}

constexpr double kGradClip = 1.8;

TrainConfig base(const Case& c) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = c.ranks_accum[0].first;
  config.train.accum = c.ranks_accum[0].second;
  config.train.steps = 10;
  config.train.batch = 1;
  config.train.warmup = 3;
  config.train.optimizer = c.optimizer;
  config.train.lr = c.optimizer == OptimizerKind::kSgd ? 0.1 : 3e-3;
  config.train.grad_clip = c.overlaps ? 0 : kGradClip;
  config.train.accum_comm = c.accum_comm;
  config.precision = c.precision;
  config.comm.hook = c.hook;
  config.comm.powersgd = {
      .low_rank = {.rank = 2}, .start_step = 4, .across_replicas = c.across_replicas};
  if (c.across_replicas) config.parallel.strategy = "hsdp";
  return config;
}

/// What must not change the numbers, by `row` of the array.
TrainConfig variant(const Case& c, int row) {
  constexpr std::array<const char*, 11> kStrategies = {
      "zero3", "shard_grad_op", "ddp",   "zero3", "zero1", "zero2",
      "hsdp",  "hybrid_zero2",  "hfsdp", "zero3", "hsdp"};
  constexpr std::array<std::int64_t, 4> kPrefetch = {0, 1, 2, 9};
  constexpr std::array<std::int64_t, 4> kUnitMinNumel = {0, 20'000, 60'000, std::int64_t{1} << 40};
  TrainConfig config = base(c);
  std::array<std::size_t, 5> level{};
  for (std::size_t i = 0; i < level.size(); ++i) {
    level[i] = static_cast<std::size_t>(testing::covering_levels(row)[i]);
  }
  auto strategy = static_cast<std::size_t>(16 * c.number + row) % kStrategies.size();
  if (c.across_replicas) strategy = row % 2 == 0 ? 6 : 7;  // shards cut alike
  config.parallel.strategy = kStrategies[strategy];
  if (strategy == 3) config.parallel.reshard_after_forward = "false";
  config.parallel.reductions_in_flight = static_cast<std::int64_t>(level[0]);
  config.parallel.prefetch = kPrefetch[level[1]];
  config.parallel.unit_min_numel = kUnitMinNumel[level[2]];
  if (level[1] > 0 && level[2] % 2 == 1 &&
      shard::Placement::preset(config.parallel.strategy).parameters != shard::Place::kWhole) {
    config.parallel.backward_prefetch = shard::BackwardPrefetch::kPost;
  }
  if (level[3] % 2 == 1) {
    config.train.recompute = level[3] == 1 ? Recompute(true) : Recompute::first(1 + row % 2);
  }
  std::tie(config.parallel.ranks, config.train.accum) = c.ranks_accum[level[4]];
  if (strategy == 9 && config.parallel.ranks % 2 == 0) config.parallel.reshard_after_forward = "2";
  // Packing of reductions alone, where there is nothing to gather.
  if (level[2] % 2 == 1 &&
      shard::Placement::preset(config.parallel.strategy).parameters == shard::Place::kWhole) {
    config.parallel.bucket_mb = 4.0 * static_cast<double>(config.parallel.unit_min_numel) / 0x1p20;
    config.parallel.unit_min_numel = 0;
  }
  if (strategy == 10) config.parallel.shard_ranks = config.parallel.ranks;
  if (config.comm.options().kind == shard::HookKind::kBatchedPowerSgd || c.across_replicas) {
    // It compresses units, whatever is packed into them, or shards of them.
    config.parallel.unit_min_numel = base(c).parallel.unit_min_numel;
    config.parallel.bucket_mb = base(c).parallel.bucket_mb;
  }
  config.comm.powersgd.offload_error = row % 3 == 0;
  constexpr std::array<OffloadConfig, 4> kOffload = {
      OffloadConfig{},
      {.parameters = 0.31, .gradients = 0.62, .optimizer = 0.47, .threads = 2},
      {.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 1},
      {.parameters = 0.8, .optimizer = 0.3, .threads = 1}};
  config.offload = kOffload[static_cast<std::size_t>(row + c.number) % kOffload.size()];
  if (!shard::can_offload_parameters(shard::Placement::preset(config.parallel.strategy),
                                     config.precision)) {
    config.offload.parameters = 0;
  }
  if (c.overlaps) {
    config.train.overlap_optimizer =
        row % 3 == 0 ? OverlapOptimizer::kBackward : OverlapOptimizer::kInterleaved;
  }
  return config;
}

std::string describe(const TrainConfig& c) {
  return fmt::format(
      "{} shard_ranks {} reshard {}, prefetch {}, unit_min_numel {}, bucket_mb {}, recompute {}, "
      "offload {} {} {}, hook {}, {} ranks x {}",
      c.parallel.strategy, c.parallel.shard_ranks, c.parallel.reshard_after_forward,
      c.parallel.prefetch, c.parallel.unit_min_numel, c.parallel.bucket_mb, c.train.recompute.str(),
      c.offload.parameters, c.offload.gradients, c.offload.optimizer, c.comm.hook, c.parallel.ranks,
      c.train.accum);
}

class Equivalence : public ::testing::TestWithParam<Case> {};

TEST_P(Equivalence, DistributionChangesNoBit) {
  const GptRun want = run_gpt(base(GetParam()), kModel, tokens());
  ASSERT_EQ(want.params_sha256.size(), 64u);
  // Clipping is at work in some steps and not in others.
  const auto clipped =
      std::ranges::count_if(want.grad_norm, [](double n) { return n > kGradClip; });
  EXPECT_TRUE(GetParam().overlaps || (clipped > 0 && clipped < std::ssize(want.grad_norm)))
      << clipped;
  for (int row = 0; row < testing::kCoveringRows; ++row) {
    const TrainConfig config = variant(GetParam(), row);
    const GptRun got = run_gpt(config, kModel, tokens());
    EXPECT_EQ(got.params_sha256, want.params_sha256) << describe(config);
    EXPECT_EQ(got.loss, want.loss) << describe(config);
    EXPECT_EQ(got.grad_norm, want.grad_norm) << describe(config);
  }
}

TEST_P(Equivalence, LearnsWhatFollowsWhat) {
  TrainConfig config = base(GetParam());
  const bool is_batched = config.comm.options().kind == shard::HookKind::kBatchedPowerSgd;
  config.train.steps = is_batched ? 240 : config.comm.options().compresses() ? 120 : 60;
  const std::int64_t micros = config.parallel.ranks * config.train.accum;
  config.train.batch = std::max<std::int64_t>(1, 4 / micros);
  const GptRun run = run_gpt(config, kModel, tokens());
  EXPECT_NEAR(run.loss.front(), std::log(kModel.vocab), 0.1);  // it knows nothing
  const double last = std::accumulate(run.loss.end() - 5, run.loss.end(), 0.0) / 5;
  EXPECT_LT(last, entropy_of_tokens() - 0.3);
}

TEST_P(Equivalence, WhatMattersChangesBits) {
  TrainConfig config = base(GetParam());
  config.train.steps = 6;
  const std::string before = run_gpt(config, kModel, tokens()).params_sha256;
  EXPECT_EQ(run_gpt(config, kModel, tokens()).params_sha256, before) << "not repeatable";
  config.train.seed += 1;
  EXPECT_NE(run_gpt(config, kModel, tokens()).params_sha256, before) << "seed";
  config.train.seed -= 1;
  config.train.lr *= 1.001;
  EXPECT_NE(run_gpt(config, kModel, tokens()).params_sha256, before) << "lr";
  config.train.lr = base(GetParam()).train.lr;
  GptConfig model = kModel;
  model.dropout = 0.11;
  EXPECT_NE(run_gpt(config, model, tokens()).params_sha256, before) << "dropout";
}

constexpr shard::Precision kBf16 = {DType::kBF16, DType::kBF16, DType::kBF16};
constexpr shard::Precision kBf16Params = {DType::kBF16, DType::kF32, DType::kF32};
constexpr shard::Precision kBf16Wire = {DType::kBF16, DType::kBF16, DType::kF32};
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kSix = {
    {{1, 6}, {2, 3}, {3, 2}, {6, 1}}};
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kFour = {
    {{1, 4}, {2, 2}, {4, 1}, {2, 2}}};
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kEight = {
    {{1, 8}, {2, 4}, {4, 2}, {8, 1}}};
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kOne = {
    {{1, 1}, {1, 1}, {1, 1}, {1, 1}}};
// Sums that start on one rank have an order that depends on the number of ranks.
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kThreeByTwo = {
    {{3, 2}, {3, 2}, {3, 2}, {3, 2}}};
// What a hook makes of gradients depends on whose they are.
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kTwoByTwo = {
    {{2, 2}, {2, 2}, {2, 2}, {2, 2}}};
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> kFourByOne = {
    {{4, 1}, {4, 1}, {4, 1}, {4, 1}}};

INSTANTIATE_TEST_SUITE_P(
    Cases, Equivalence,
    ::testing::Values(
        Case{"AdamW", kSix}, Case{"Sgd", kEight, OptimizerKind::kSgd, {}, AccumComm::kEvery, 1},
        Case{"AdamWBf16", kFour, OptimizerKind::kAdamW, kBf16, AccumComm::kEvery, 2},
        Case{"SgdBf16Wire", kSix, OptimizerKind::kSgd, kBf16Wire, AccumComm::kEvery, 3},
        Case{"OneRank", kOne},
        Case{"Overlapped", kSix, OptimizerKind::kAdamW, {}, AccumComm::kEvery, 4, true},
        Case{"OverlappedBf16", kFour, OptimizerKind::kAdamW, kBf16, AccumComm::kEvery, 10, true},
        Case{"CommunicateLast", kThreeByTwo, OptimizerKind::kAdamW, {}, AccumComm::kLast},
        Case{"PowerSgd",
             kTwoByTwo,
             OptimizerKind::kSgd,
             {},
             AccumComm::kEvery,
             5,
             false,
             "powersgd"},
        Case{"PowerSgdBf16", kThreeByTwo, OptimizerKind::kAdamW, kBf16Params, AccumComm::kLast, 6,
             false, "f16+powersgd"},
        Case{"PowerSgdOverlapped",
             kFourByOne,
             OptimizerKind::kSgd,
             {},
             AccumComm::kEvery,
             7,
             true,
             "bf16+powersgd"},
        Case{"BatchedPowerSgd",
             kFourByOne,
             OptimizerKind::kSgd,
             {},
             AccumComm::kEvery,
             8,
             false,
             "batched_powersgd"},
        Case{"PowerSgdAcrossReplicas",
             kFourByOne,
             OptimizerKind::kAdamW,
             {},
             AccumComm::kEvery,
             11,
             true,
             "powersgd",
             true},
        Case{"F16", kTwoByTwo, OptimizerKind::kAdamW, {}, AccumComm::kEvery, 9, true, "f16"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::tools
