// Small models of Llama's kind train on a GPU as they do in Hugging Face transformers: rotations
// with scaling, grouped queries, norms of queries and keys.
#include <gtest/gtest.h>

#include "tests/tools/train/llama_golden.h"

namespace tessera::tools {
namespace {

// f32 sums in another order; on a GPU that multiplies f32 as TF32 there would be more.
TEST(CudaLlama, TrainsAsTransformersDoes) {
  for (const char* name : {"llama_scaled", "mistral_grouped", "qwen2_tied", "qwen3_biases"}) {
    SCOPED_TRACE(name);
    TrainConfig config;
    config.device = DeviceChoice::kCuda;
    config.parallel.backend = BackendChoice::kThreads;
    config.train.steps = 3;
    const testing::GptRun run = llama_golden::train(name, 2, config);
    const nlohmann::json want = llama_golden::golden().at("runs").at(name);
    ASSERT_EQ(run.loss.size(), 3U);
    llama_golden::expect_near(run.loss, want.at("loss"), 1e-4, "loss");
    llama_golden::expect_near(run.grad_norm, want.at("grad_norm"), 1e-3, "gradient norm");
  }
}

}  // namespace
}  // namespace tessera::tools
