// What is said of models of Llama's kind: sizes, operations, and what is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/parameter.h"
#include "engine/tape.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/models/family.h"
#include "tools/models/model.h"

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

// What no number of parameters tells.
TEST(LlamaModel, PresetsAreThoseOfTheirAuthors) {
  EXPECT_EQ(to_text(preset_config("llama3.2-1b")),
            R"({"model":"llama","layers":16,"heads":32,"dim":2048,"seq":131072,"vocab":128256,)"
            R"("kv_heads":8,"head_dim":0,"mlp_dim":8192,"norm_eps":1e-05,"rope_theta":500000,)"
            R"("rope_scaling":2,"rope_factor":32,"rope_low":1,"rope_high":4,"rope_positions":8192,)"
            R"("tied":1,"qkv_bias":0,"out_bias":0,"mlp_bias":0})");
  const auto said = [](const char* preset) {
    const ModelConfig c = preset_config(preset);
    return std::tuple(c.heads, c.numbers.at("kv_heads"), c.seq, c.numbers.at("norm_eps"),
                      c.numbers.at("rope_theta"), c.numbers.at("rope_scaling"),
                      c.numbers.at("head_dim"));
  };
  EXPECT_EQ(said("smollm2-135m"), std::tuple(9, 3, 8192, 1e-5, 1e5, 0, 0));
  EXPECT_EQ(said("tinyllama-1.1b"), std::tuple(32, 4, 2048, 1e-5, 1e4, 0, 0));
  EXPECT_EQ(said("llama3-8b"), std::tuple(32, 8, 8192, 1e-5, 5e5, 0, 0));
  EXPECT_EQ(said("llama3-70b"), std::tuple(64, 8, 8192, 1e-5, 5e5, 0, 0));
  EXPECT_EQ(said("qwen2.5-0.5b"), std::tuple(14, 2, 32768, 1e-6, 1e6, 0, 0));
  EXPECT_EQ(said("qwen3-0.6b"), std::tuple(16, 8, 40960, 1e-6, 1e6, 0, 128));
}

// A checkpoint goes on from a folder that its model was saved to.
TEST(LlamaModel, HasOneTextHoweverItIsMade) {
  for (const char* preset : {"qwen3-0.6b", "smollm2-135m"}) {
    ModelConfig config = preset_config(preset);
    config.layers = 1;
    config.heads = static_cast<std::int64_t>(config.numbers.at("kv_heads"));
    config.dim = config.heads * 128;
    const testing::TempFolder folder;
    folder.write("config.json", config.make()->config_text());
    EXPECT_EQ(to_text(read_model_config(folder.path())), to_text(config)) << preset;
  }
}

TEST(LlamaModel, DropsInTrainingAlone) {
  ModelConfig config = preset_config("smollm2-135m");
  config.layers = 2;
  config.heads = 3;
  config.dim = 12;
  config.vocab = 16;
  config.numbers["mlp_dim"] = 8;
  config.dropout = 0.5;
  const engine::Memory memory;
  engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const auto model = config.make();
  engine::materialize(parameters_of(*model), memory, 1);
  const std::vector<std::int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  const engine::Tensor batch = engine::Tensor::from<std::int32_t>(memory, {2, 4}, tokens);
  const auto loss = [&](const Pass& pass) {
    return tape.no_grad([&] { return model->loss(tape, {batch, batch}, pass).item(); });
  };
  const float without = loss({.training = false});
  EXPECT_NE(loss({.seed = 1}), without);
  EXPECT_NE(loss({.seed = 1}), loss({.seed = 2}));
  EXPECT_EQ(loss({.seed = 1}), loss({.seed = 1}));
  EXPECT_NE(loss({.seed = 1, .first_sample = 2}), loss({.seed = 1}));
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
