// What is planned for GPUs, without one, is what the emulated device measures: all but the
// workspace of products, of which the plan knows a bound.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/sanitizers.h"
#include "tests/tools/testing/covering_configs.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/planning/budget.h"
#include "tools/planning/planner.h"

namespace tessera::tools {
namespace {

using engine::Category;
using engine::DType;

constexpr GptConfig kModel = {.layers = 3, .heads = 2, .dim = 16, .seq = 8, .vocab = 40};

PlanTarget target_of(const TrainConfig& config, int rank) {
  const bool is_nccl = config.parallel.backend == BackendChoice::kNccl;
  return {.num_ranks = static_cast<int>(config.parallel.ranks),
          .rank = rank,
          .on_gpus = true,
          .sums_in_rank_order = !is_nccl || config.parallel.canonical,
          .stages = is_nccl};
}

TrainPlan plan_of(const TrainConfig& config, int rank) {
  Gpt model(kModel);
  const engine::Shape shape{1, kModel.seq};
  return make_plan(config, target_of(config, rank), model,
                   {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
}

// As a budget is checked: one rank of each kind.
std::int64_t most_of(const TrainConfig& config) {
  Gpt model(kModel);
  return peak_nbytes(most_of_ranks(
      static_cast<int>(config.parallel.ranks),
      [&](int rank) { return rank_kind(config, target_of(config, rank), model); },
      [&](int rank) { return plan_of(config, rank); }));
}

void expect_as_planned(const TrainConfig& config, const std::string& text) {
  const testing::TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("text.txt", std::string(500, '\7'))),
                          {.seq = kModel.seq, .vocab = kModel.vocab});
  const testing::GptRun run = testing::run_gpt(config, kModel, data);
  const std::int64_t most = most_of(config);
  for (int rank = 0; rank < static_cast<int>(config.parallel.ranks); ++rank) {
    const TrainPlan plan = plan_of(config, rank);
    EXPECT_LE(peak_nbytes(plan), most) << text << ", rank " << rank;
    const std::vector<StepRecord>& steps = run.steps[static_cast<std::size_t>(rank)];
    ASSERT_EQ(std::ssize(steps), config.train.steps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const StepRecord& measured = steps[i];
      const StepRecord& planned =
          measured.replayed.empty() ? planned_step(plan, measured.step) : *plan.repeated;
      const std::string what = fmt::format("{}, rank {}, step {}", text, rank, i + 1);
      EXPECT_EQ(measured.traffic, planned.traffic) << what;
      for (std::size_t c = 0; c < engine::kNumCategories; ++c) {
        const auto category = static_cast<Category>(c);
        const std::int64_t nbytes = measured.step_memory.peak_nbytes[c];
        if (category == Category::kWorkspace) {
          EXPECT_LE(nbytes, planned.step_memory.peak_nbytes[c]) << what;
        } else {
          EXPECT_EQ(nbytes, planned.step_memory.peak_nbytes[c]) << what << " " << name_of(category);
        }
        // Norms of 8 bytes on their way to the host: more of them if the GPU is late.
        const std::int64_t slack = category == Category::kWorkspace ? 64 : 0;
        EXPECT_LE(std::abs(measured.step_host_memory.peak_nbytes[c] -
                           planned.step_host_memory.peak_nbytes[c]),
                  slack)
            << what << " host " << name_of(category);
      }
    }
  }
}

TEST(EmulatedPlan, SaysWhatGpusDo) {
  using testing::config_factor;
  using Config = TrainConfig&;
  TrainConfig base;
  base.device = DeviceChoice::kCuda;
  base.train.steps = 3;
  base.train.batch = 1;
  base.train.lr = 1e-3;
  base.out = "unused";
  std::vector<testing::ConfigFactor> factors = testing::parallel_factors();
  factors.push_back(
      {{"backend=threads", [](Config c) { c.parallel.backend = BackendChoice::kThreads; }},
       {"backend=nccl", [](Config c) { c.parallel.backend = BackendChoice::kNccl; }},
       {"backend=nccl canonical=true", [](Config c) {
          c.parallel.backend = BackendChoice::kNccl;
          c.parallel.canonical = true;
        }}});
  factors.push_back(config_factor<DType>("dtype",
                                         [](Config c) -> auto& { return c.precision.param; },
                                         {{"f32", DType::kF32}, {"bf16", DType::kBF16}}));
  factors.push_back(config_factor<OffloadConfig>(
      "offload", [](Config c) -> auto& { return c.offload; },
      {{"none", {}}, {"parts", {.gradients = 0.6, .optimizer = 0.6, .threads = 1}}}));
  const testing::CoveringConfigs covering = testing::covering_configs(base, factors);
  std::set<std::string> refused = {"ranks=1 with reshard=2", "ranks=3 with reshard=2"};
  for (const char* whole : {"ddp", "zero1", "zero2", "hybrid_zero2"}) {
    for (const char* level : {"true", "2"}) {
      refused.insert(fmt::format("strategy={} with reshard={}", whole, level));
    }
  }
  EXPECT_EQ(covering.impossible, refused);
  EXPECT_GE(covering.rows.size(), 8u * 4);  // strategies x ranks
  EXPECT_LT(covering.rows.size(), 48u);
  for (std::size_t row = 0; row < covering.rows.size(); ++row) {
    if (testing::kIsSlow && row % 5 != 0) continue;
    expect_as_planned(covering.rows[row].config, covering.rows[row].text);
  }
}

// What the covering set leaves out, in a few rows: each choice at least once.
TEST(EmulatedPlan, SaysWhatGpusDoWithEachOtherChoice) {
  using Config = TrainConfig&;
  const auto powersgd = [](Config c, const char* hook, std::int64_t start_step) {
    c.comm.hook = hook;
    c.comm.powersgd.start_step = start_step;
    c.comm.powersgd.low_rank = {.rank = 2, .min_compression_rate = 1};
  };
  const auto nccl = [](Config c) { c.parallel.backend = BackendChoice::kNccl; };
  struct Row {
    const char *strategy, *text;
    std::function<void(Config)> set;
  };
  const std::vector<Row> rows = {
      {"ddp", "bf16 on nccl's wire",
       [&](Config c) {
         nccl(c);
         c.comm.hook = "bf16";
       }},
      {"zero3", "f16 on the wire", [](Config c) { c.comm.hook = "f16"; }},
      {"ddp", "PowerSGD after a step", [&](Config c) { powersgd(c, "powersgd", 1); }},
      {"zero2", "PowerSGD over nccl, errors on the host",
       [&](Config c) {
         nccl(c);
         powersgd(c, "powersgd", 0);
         c.comm.powersgd.offload_error = true;
       }},
      {"zero1", "batched PowerSGD", [&](Config c) { powersgd(c, "batched_powersgd", 0); }},
      {"hsdp", "PowerSGD between replicas",
       [&](Config c) {
         powersgd(c, "powersgd", 0);
         c.parallel.ranks = 4;
         c.parallel.shard_ranks = 2;
         c.comm.powersgd.across_replicas = true;
       }},
      {"zero3", "reduced in bf16 over nccl",
       [&](Config c) {
         nccl(c);
         c.precision = {DType::kF32, DType::kBF16, DType::kF32};
       }},
      {"zero2", "bf16 throughout",
       [](Config c) {
         c.precision = {DType::kBF16, DType::kBF16, DType::kBF16};
       }},
      {"zero3", "reduced at the last micro-step",
       [](Config c) { c.train.accum_comm = AccumComm::kLast; }},
      {"ddp", "SGD, reduced at the last micro-step, over nccl",
       [&](Config c) {
         nccl(c);
         c.train.accum_comm = AccumComm::kLast;
         c.train.optimizer = OptimizerKind::kSgd;
       }},
      {"zero3", "SGD, packed",
       [](Config c) {
         c.train.optimizer = OptimizerKind::kSgd;
         c.parallel.unit_min_numel = 4000;
       }},
      {"zero1", "in buckets", [](Config c) { c.parallel.bucket_mb = 0.02; }},
      {"hfsdp", "two replicas of two ranks",
       [](Config c) {
         c.parallel.ranks = 4;
         c.parallel.shard_ranks = 2;
       }},
      {"hybrid_zero2", "replicas of one rank",
       [](Config c) {
         c.parallel.ranks = 3;
         c.parallel.shard_ranks = 1;
       }},
      {"zero3", "all offloaded",
       [](Config c) {
         c.precision.param = DType::kBF16;
         c.offload = {.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 1};
       }},
      {"zero1", "parts offloaded, packed",
       [](Config c) {
         c.precision.param = DType::kBF16;
         c.parallel.ranks = 3;
         c.parallel.unit_min_numel = 4000;
         c.offload = {.parameters = 0.31, .gradients = 0.62, .optimizer = 0.47, .threads = 2};
       }},
      {"zero3", "a step made again", [](Config c) { c.train.verify_every = 2; }},
      {"ddp", "each loss looked at, a step made again",
       [&](Config c) {
         nccl(c);
         c.train.verify_every = 2;
         c.train.spike_factor = 100;
       }},
  };
  for (const Row& row : rows) {
    TrainConfig config;
    config.device = DeviceChoice::kCuda;
    config.parallel.ranks = 2;
    config.parallel.backend = BackendChoice::kThreads;
    config.parallel.strategy = row.strategy;
    config.train.steps = 4;
    config.train.accum = 2;
    config.train.batch = 1;
    config.train.lr = 1e-3;
    config.out = "unused";
    row.set(config);
    expect_as_planned(config, fmt::format("{}, {}", row.strategy, row.text));
  }
}

TEST(EmulatedPlan, SaysWhatGpusDoThatUpdateDuringBackward) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const auto overlap : {OverlapOptimizer::kBackward, OverlapOptimizer::kInterleaved}) {
      for (const double offload : {0.0, 0.6}) {
        if (testing::kIsSlow && (offload > 0) != (overlap == OverlapOptimizer::kBackward)) continue;
        TrainConfig config;
        config.device = DeviceChoice::kCuda;
        config.parallel.ranks = 2;
        config.parallel.backend = BackendChoice::kThreads;
        config.parallel.strategy = strategy;
        config.precision.param = DType::kBF16;
        config.offload = {
            .parameters = offload, .gradients = offload, .optimizer = offload, .threads = 1};
        config.train.steps = 3;
        config.train.accum = 2;
        config.train.recompute = true;
        config.train.batch = 1;
        config.train.lr = 1e-3;
        config.train.overlap_optimizer = overlap;
        config.train.grad_clip = 0;
        expect_as_planned(
            config, fmt::format("{} {} offload {}", strategy,
                                overlap == OverlapOptimizer::kBackward ? "backward" : "interleaved",
                                offload));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::tools
