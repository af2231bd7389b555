// What is planned for GPUs, without one, is what the emulated device measures: all but the
// workspace of products, of which the plan knows a bound.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/sanitizers.h"
#include "tests/tools/train/covering_configs.h"
#include "tests/tools/train/gpt_run.h"
#include "tools/train/planner.h"

namespace tessera::tools {
namespace {

using engine::Category;
using engine::DType;

constexpr GptConfig kModel = {.layers = 3, .heads = 2, .dim = 16, .seq = 8, .vocab = 40};

TrainPlan plan_of(const TrainConfig& config, int rank) {
  Gpt model(kModel);
  const engine::Shape shape{1, kModel.seq};
  const bool is_nccl = config.parallel.backend == BackendChoice::kNccl;
  return make_plan(config,
                   {.num_ranks = static_cast<int>(config.parallel.ranks),
                    .rank = rank,
                    .on_gpus = true,
                    .sums_in_rank_order = !is_nccl || config.parallel.canonical,
                    .is_nccl = is_nccl},
                   model, {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
}

void expect_as_planned(const TrainConfig& config, const std::string& text) {
  const testing::TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("text.txt", std::string(500, '\7'))),
                          {.seq = kModel.seq, .vocab = kModel.vocab});
  const testing::GptRun run = testing::run_gpt(config, kModel, data);
  for (int rank = 0; rank < static_cast<int>(config.parallel.ranks); ++rank) {
    const TrainPlan plan = plan_of(config, rank);
    const std::vector<StepRecord>& steps = run.steps[static_cast<std::size_t>(rank)];
    ASSERT_EQ(std::ssize(steps), config.train.steps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const StepRecord& measured = steps[i];
      const StepRecord& planned = planned_step(plan, measured.step);
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

TEST(EmulatedPlan, SaysWhatGpusDoThatUpdateBesideBackward) {
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
