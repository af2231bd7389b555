// Training whose products multiply with the slope of GELU themselves, as a choice by time may find
// to be faster: how it is distributed changes no bit, and the memory is that without.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/gemm/gemm_algorithms.h"
#include "tests/cuda_emulation/forced_slope.h"
#include "tests/testing/sanitizers.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/planning/planner.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::GemmAlgorithms;
using testing::GptRun;

constexpr GptConfig kModel = {
    .layers = 2, .heads = 2, .dim = 16, .seq = 8, .vocab = 40, .dropout = 0.1};

// Four samples a step, however many ranks.
TrainConfig configure(const char* strategy, std::int64_t ranks, bool recompute) {
  TrainConfig config;
  config.device = DeviceChoice::kCuda;
  config.precision.param = DType::kBF16;
  config.parallel.ranks = ranks;
  config.parallel.backend = BackendChoice::kThreads;
  config.parallel.strategy = strategy;
  config.train.recompute = recompute;
  config.train.accum = 4 / ranks;
  config.train.steps = 4;
  config.train.batch = 1;
  config.train.lr = 5e-3;
  config.out = "unused";
  return config;
}

TrainPlan plan_of(const TrainConfig& config,
                  const std::shared_ptr<std::vector<engine::DeviceProduct>>& gemms) {
  Gpt model(kModel);
  const engine::Shape shape{1, kModel.seq};
  return make_plan(
      config,
      {.num_ranks = static_cast<int>(config.parallel.ranks), .on_gpus = true, .gemms = gemms},
      model, {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
}

// Without `algorithms` every slope is apart.
GptRun train(const TrainConfig& config, const std::shared_ptr<GemmAlgorithms>& algorithms) {
  const testing::TempFolder folder;
  std::string text;
  for (int i = 0; i < 500; ++i) text += static_cast<char>((i * i + 7 * i) % 37);
  const TokenDataset data(TokenFile(folder.write("text.txt", text)),
                          {.seq = kModel.seq, .vocab = kModel.vocab});
  return testing::run_gpt(config, kModel, data, "", nullptr, {},
                          [&](engine::Tape& tape, const engine::Tensor& loss, std::int64_t) {
                            // In time for the first backward, and slopes are part of no forward.
                            engine::set_gemm_algorithms(tape.stream(), algorithms);
                            return loss;
                          });
}

TEST(EmulatedSlope, StrategiesHaveTheSameBitsAndThePlannedMemory) {
  struct Variant {
    const char* strategy;
    std::int64_t ranks;
    bool recompute;
  };
  constexpr Variant kVariants[] = {
      {"ddp", 1, false},  {"zero3", 1, true},          {"zero3", 2, false}, {"zero3", 4, true},
      {"zero1", 2, true}, {"shard_grad_op", 4, false}, {"hsdp", 4, false}};
  std::string fused_hash;
  for (const Variant& v : kVariants) {
    if (testing::kIsSlow && v.ranks == 2) continue;
    const TrainConfig config = configure(v.strategy, v.ranks, v.recompute);
    const std::string what =
        fmt::format("{}, {} ranks{}", v.strategy, v.ranks, v.recompute ? ", recompute" : "");
    const auto gemms = std::make_shared<std::vector<engine::DeviceProduct>>();
    const TrainPlan plan = plan_of(config, gemms);
    const auto forced = cuda_emulation::forced_slopes(*gemms, 2);
    EXPECT_EQ(forced->size(), 1) << what << ": all layers are alike";
    const GptRun fused = train(config, forced), apart = train(config, nullptr);
    EXPECT_NE(fused.params_sha256, apart.params_sha256) << what << ": nothing was fused";
    EXPECT_EQ(fused.loss.front(), apart.loss.front()) << what << ": forward is another";
    const double norm = apart.grad_norm.front();
    EXPECT_NEAR(fused.grad_norm.front(), norm, 0x1p-9 * norm) << what;
    if (fused_hash.empty()) fused_hash = fused.params_sha256;
    EXPECT_EQ(fused.params_sha256, fused_hash) << what;
    ASSERT_EQ(fused.steps.front().size(), 4u);
    for (const StepRecord& step : fused.steps.front()) {
      for (std::size_t c = 0; c < engine::kNumCategories; ++c) {
        const std::int64_t nbytes = step.step_memory.peak_nbytes[c],
                           planned = planned_step(plan, step.step).step_memory.peak_nbytes[c];
        if (static_cast<engine::Category>(c) == engine::Category::kWorkspace) {
          EXPECT_LE(nbytes, planned) << what;
        } else {
          EXPECT_EQ(nbytes, planned) << what << " " << name_of(static_cast<engine::Category>(c));
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::tools
