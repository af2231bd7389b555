// What is said of models of Llama's kind: sizes, operations, and what is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tools/models/family.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;

// As their authors count them; a tied head is the embedding.
TEST(LlamaModel, PresetsHaveTheParametersOfTheirModels) {
  const std::pair<const char*, std::int64_t> models[] = {
      {"smollm2-135m", 134'515'008},  {"tinyllama-1.1b", 1'100'048'384},
      {"llama3.2-1b", 1'235'814'400}, {"llama3-8b", 8'030'261'248},
      {"llama3-70b", 70'553'706'496}, {"qwen2.5-0.5b", 494'032'768},
      {"qwen3-0.6b", 596'049'920},
  };
  for (const auto& [name, num_parameters] : models) {
    EXPECT_EQ(preset_config(name).num_parameters(), num_parameters) << name;
  }
}

// 2 x 3 for each weight that multiplies a token, and 12 H D for each pair of a token and one that
// it sees.
TEST(LlamaModel, CountsItsOperations) {
  const ModelConfig config = preset_config("llama3-8b");
  const double weights = 32.0 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096.0 * 128256;
  const double pairs = 32 * 12.0 * 4096 * 100 * 101 / 2;
  EXPECT_DOUBLE_EQ(config.train_flops(100), 6 * weights * 100 + pairs);
}

TEST(LlamaModel, RefusesSizesThatDoNotFit) {
  const auto refusal = [](const auto& change) {
    ModelConfig config = preset_config("smollm2-135m");
    change(config);
    return error_of<InvalidArgument>([&] { static_cast<void>(config.make()); });
  };
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.heads = 8; }), {"model.kv_heads (3)", "got 8"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.heads = 7; }), {"model.heads (7)", "got 576"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.numbers["kv_heads"] = 2; }),
                  {"model.kv_heads (2)", "got 9"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.numbers["mlp_dim"] = 0; }), {"model.mlp_dim"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.dim = 9 * 63; }), {"even size of heads", "63"}));
  EXPECT_TRUE(
      has(refusal([](ModelConfig& c) { c.numbers["rope_scaling"] = 3; }), {"rope_scaling"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.dropout = 1; }), {"model.dropout"}));
}

}  // namespace
}  // namespace tessera::tools
