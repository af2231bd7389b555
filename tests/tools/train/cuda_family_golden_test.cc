// Small models of Llama's kind and of GPT-NeoX train on a GPU as they do in Hugging Face
// transformers: rotations with scaling or of a part of each head, grouped queries, norms of queries
// and keys, layers whose branches take one input.
#include <gtest/gtest.h>

#include "tests/tools/train/family_golden.h"

namespace tessera::tools {
namespace {

// f32 sums in another order; on a GPU that multiplies f32 as TF32 there would be more.
TEST(CudaFamilies, TrainsAsTransformersDoes) {
  const family_golden::GoldenModel models[] = {
      {"llama", "llama_scaled"}, {"llama", "mistral_grouped"}, {"llama", "qwen2_tied"},
      {"llama", "qwen3_biases"}, {"gpt_neox", "neox_quarter"}, {"gpt_neox", "neox_sequential"}};
  for (const family_golden::GoldenModel& model : models) {
    SCOPED_TRACE(model.name);
    TrainConfig config;
    config.device = DeviceChoice::kCuda;
    config.parallel.backend = BackendChoice::kThreads;
    config.train.steps = 3;
    const testing::GptRun run = family_golden::train(model, 2, config);
    const nlohmann::json want = model.run();
    ASSERT_EQ(run.loss.size(), 3U);
    family_golden::expect_near(run.loss, want.at("loss"), 1e-4, "loss");
    family_golden::expect_near(run.grad_norm, want.at("grad_norm"), 1e-3, "gradient norm");
  }
}

}  // namespace
}  // namespace tessera::tools
