// A run equals one by Hugging Face transformers: see tests/golden/make_gpt2_golden.py. That
// transformers loads what we save is checked by hand: see tests/golden/check_hf_roundtrip.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/safetensors.h"
#include "tests/testing/json.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/models/family.h"

namespace tessera::tools {
namespace {

using testing::GptRun;
using testing::run_gpt;

// What float32 rounding leaves between us and transformers, with room: the float32 run of
// transformers is itself this far from its float64 run.
constexpr double kLossTolerance = 5e-6;
constexpr double kNormTolerance = 2e-5;
constexpr double kParameterTolerance = 1e-5;

const std::string kFolder = "tests/golden/";

nlohmann::json golden() {
  return testing::parse_json(engine::read_text_file(kFolder + "gpt2_tiny_sgd.json", 1 << 20));
}

GptRun train(std::int64_t ranks, double grad_clip, const shard::Precision& precision = {}) {
  const nlohmann::json training = golden().at("training");
  const GptConfig model = gpt_config(read_model_config(kFolder + "gpt2_tiny"));
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = ranks;
  config.train.steps = training.at("steps");
  config.train.batch = training.at("batch").get<std::int64_t>() / ranks;
  config.train.optimizer = OptimizerKind::kSgd;
  config.train.lr = training.at("lr");
  config.train.momentum = training.at("momentum");
  config.train.schedule = ScheduleKind::kConstant;
  config.train.grad_clip = grad_clip;
  config.precision = precision;
  const TokenDataset data(TokenFile(kFolder + "gpt2_tiny_tokens.bin"),
                          {.seq = model.seq, .vocab = model.vocab});
  return run_gpt(config, model, data, kFolder + "gpt2_tiny");
}

void expect_near(const std::vector<double>& got, const nlohmann::json& want, double tolerance,
                 const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  ASSERT_FALSE(got.empty()) << what;
  for (std::size_t step = 0; step < got.size(); ++step) {
    const double expected = want[step];
    EXPECT_NEAR(got[step], expected, tolerance * expected) << what << " of step " << step;
  }
}

class Golden : public ::testing::TestWithParam<int> {};  // ranks that share the batch of 4

TEST_P(Golden, TrainsAsTransformersDoes) {
  const nlohmann::json want = golden().at("runs").at("no_clip");
  const GptRun run = train(GetParam(), 0);
  expect_near(run.loss, want.at("loss"), kLossTolerance, "loss");
  expect_near(run.grad_norm, want.at("grad_norm"), kNormTolerance, "gradient norm");

  const engine::SafetensorsFile final(kFolder + "gpt2_tiny_final.safetensors");
  ASSERT_EQ(final.tensors().size(), run.parameters.size());
  for (const auto& [name, got] : run.parameters) {
    const engine::TensorInfo* tensor = final.find("transformer." + name);
    ASSERT_NE(tensor, nullptr) << name;
    std::vector<float> expected(got.size());
    ASSERT_EQ(engine::numel(tensor->shape), std::ssize(got)) << name;
    final.read(*tensor, 0, expected);
    double largest = 0, difference = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << name << "[" << i << "]";
      largest = std::max(largest, std::abs(double{expected[i]}));
      difference = std::max(difference, std::abs(double{got[i]} - expected[i]));
    }
    EXPECT_LE(difference, kParameterTolerance * largest) << name;
  }
}

TEST_P(Golden, ClipsAsTransformersDoes) {
  const nlohmann::json want = golden().at("runs").at("clip");
  const GptRun run = train(GetParam(), want.at("max_norm"));
  expect_near(run.loss, want.at("loss"), kLossTolerance, "loss");
  expect_near(run.grad_norm, want.at("grad_norm"), kNormTolerance, "gradient norm");
  for (const auto& [name, values] : run.parameters) {
    double sum = 0;
    for (const float v : values) sum += double{v} * v;
    const double expected = want.at("final_l2").at("transformer." + name);
    EXPECT_NEAR(std::sqrt(sum), expected, kParameterTolerance * expected) << name;
  }
}

// Parameters and compute in bf16, masters in f32, on both sides. What is rounded where differs
// (transformers rounds every intermediate result, and the logits), so what is near is bounded by
// what bf16 itself changes: the run of transformers in bf16 is up to 1.3e-3 of the loss and 4.3e-2
// of the norm from its run in float32.
TEST_P(Golden, TrainsInBf16AsTransformersDoes) {
  const nlohmann::json want = golden().at("bf16");
  const GptRun run = train(GetParam(), 0, {.param = engine::DType::kBF16});
  expect_near(run.loss, want.at("loss"), 2.5e-3, "loss");
  expect_near(run.grad_norm, want.at("grad_norm"), 6e-2, "gradient norm");
  double difference = 0;
  for (std::size_t step = 0; step < run.loss.size(); ++step) {
    difference += std::abs(run.loss[step] / want.at("loss")[step].get<double>() - 1);
  }
  EXPECT_LE(difference / static_cast<double>(run.loss.size()), 8e-4);
  for (const auto& [name, values] : run.parameters) {
    double sum = 0;
    for (const float v : values) sum += double{v} * v;
    const double expected = want.at("final_l2").at("transformer." + name);
    EXPECT_NEAR(std::sqrt(sum), expected, 1.5e-2 * expected) << name;
    // Gradients are summed in f32 here, so parameters are nearer to those of the f32 run.
    const double exact = golden().at("runs").at("no_clip").at("final_l2").at("transformer." + name);
    EXPECT_NEAR(std::sqrt(sum), exact, 2e-3 * exact) << name;
  }
  EXPECT_NE(run.loss, train(GetParam(), 0).loss) << "f32 all the time";
}

INSTANTIATE_TEST_SUITE_P(Ranks, Golden, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace tessera::tools
