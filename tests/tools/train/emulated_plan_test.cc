// What is planned for GPUs, without one, is what the emulated device measures: all but the
// workspace of products, of which the plan knows a bound.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "shard/options.h"
#include "shard/placement.h"
#include "tests/testing/sanitizers.h"
#include "tests/tools/train/gpt_run.h"
#include "tools/train/planner.h"

namespace tessera::tools {
namespace {

using engine::Category;
using engine::DType;

constexpr GptConfig kModel = {.layers = 3, .heads = 2, .dim = 16, .seq = 8, .vocab = 40};

std::int64_t peak(const nlohmann::json& record, const char* which, Category category) {
  return record.at(which).at(std::string(name_of(category))).get<std::int64_t>();
}

void expect_as_planned(const TrainConfig& config) {
  Gpt model(kModel);
  const engine::Shape shape{1, kModel.seq};
  const TrainPlan plan =
      make_plan(config,
                {.num_ranks = static_cast<int>(config.parallel.ranks),
                 .on_gpus = true,
                 .sums_in_rank_order = config.parallel.backend == BackendChoice::kThreads ||
                                       config.parallel.canonical},
                model, {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
  const testing::TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("text.txt", std::string(500, '\7'))),
                          {.seq = kModel.seq, .vocab = kModel.vocab});
  const testing::GptRun run = testing::run_gpt(config, kModel, data);
  for (std::size_t i = 0; i < run.records.size(); ++i) {
    const nlohmann::json& measured = run.records[i];
    const StepRecord& planned = plan.steps[i == 0 ? 0 : 1];
    const std::string what =
        fmt::format("{} {} offload {} step {}", config.parallel.strategy,
                    name_of(config.precision.param), config.offload.optimizer, i + 1);
    EXPECT_EQ(measured.at("sent_bytes").get<std::int64_t>(), planned.traffic.bytes_sent) << what;
    EXPECT_EQ(measured.at("num_collectives").get<std::int64_t>(), planned.traffic.num_collectives)
        << what;
    for (int c = 0; c < engine::kNumCategories; ++c) {
      const auto category = static_cast<Category>(c);
      const std::int64_t nbytes = planned.memory.peak_nbytes[static_cast<std::size_t>(c)];
      if (category == Category::kWorkspace) {
        EXPECT_LE(peak(measured, "peak_bytes", category), nbytes) << what;
      } else {
        EXPECT_EQ(peak(measured, "peak_bytes", category), nbytes)
            << what << " " << name_of(category);
      }
      if (!planned.host_memory) continue;
      // Norms of 8 bytes on their way to the host: more of them if the GPU is late.
      const std::int64_t slack = category == Category::kWorkspace ? 64 : 0;
      EXPECT_LE(std::abs(peak(measured, "host_peak_bytes", category) -
                         planned.host_memory->peak_nbytes[static_cast<std::size_t>(c)]),
                slack)
          << what << " host " << name_of(category);
    }
  }
}

TrainConfig config_of(const char* strategy, bool is_bf16, double offload) {
  TrainConfig config;
  config.device = DeviceChoice::kCuda;
  config.parallel.ranks = 2;
  config.parallel.backend = BackendChoice::kThreads;
  config.parallel.strategy = strategy;
  config.precision.param = is_bf16 ? DType::kBF16 : DType::kF32;
  config.offload = {.gradients = offload, .optimizer = offload, .threads = 1};
  if (shard::can_offload_parameters(shard::Placement::preset(strategy), config.precision)) {
    config.offload.parameters = offload;
  }
  config.train.steps = 3;
  config.train.accum = is_bf16 ? 2 : 1;
  config.train.recompute = is_bf16;
  config.train.batch = 1;
  config.train.lr = 1e-3;
  return config;
}

TEST(EmulatedPlan, SaysWhatGpusDo) {
  for (const char* strategy : {"zero3", "ddp", "zero1", "hsdp"}) {
    for (const bool is_bf16 : {false, true}) {
      for (const double offload : {0.0, 0.6}) {
        if (testing::kIsSlow && (offload > 0) != is_bf16) continue;
        expect_as_planned(config_of(strategy, is_bf16, offload));
      }
    }
  }
}

TEST(EmulatedPlan, SaysWhatGpusDoThatUpdateBesideBackward) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const auto overlap : {OverlapOptimizer::kBackward, OverlapOptimizer::kInterleaved}) {
      for (const double offload : {0.0, 0.6}) {
        if (testing::kIsSlow && (offload > 0) != (overlap == OverlapOptimizer::kBackward)) continue;
        TrainConfig config = config_of(strategy, true, offload);
        config.train.overlap_optimizer = overlap;
        config.train.grad_clip = 0;
        expect_as_planned(config);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::tools
