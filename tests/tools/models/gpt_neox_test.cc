// What is said of models of GPT-NeoX: sizes, operations, dropout, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
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

// As their authors count them, with the embedding and the head.
TEST(GptNeoxModel, PresetsHaveTheParametersOfTheirModels) {
  const std::pair<const char*, std::int64_t> models[] = {{"pythia-70m", 70'426'624},
                                                         {"pythia-160m", 162'322'944},
                                                         {"pythia-410m", 405'334'016},
                                                         {"pythia-1.4b", 1'414'647'808},
                                                         {"pythia-6.9b", 6'857'302'016}};
  for (const auto& [name, num_parameters] : models) {
    EXPECT_EQ(preset_config(name).num_parameters(), num_parameters) << name;
  }
}

// What no number of parameters tells.
TEST(GptNeoxModel, PresetsAreThoseOfTheirAuthors) {
  EXPECT_EQ(to_text(preset_config("pythia-160m")),
            R"({"model":"gpt_neox","layers":12,"heads":12,"dim":768,"seq":2048,"vocab":50304,)"
            R"("mlp_dim":3072,"norm_eps":1e-05,"rotary_pct":0.25,"rope_theta":10000,"parallel":1,)"
            R"("tied":0,"attention_bias":1,"tanh_gelu":0,"rope_scaling":0,"rope_factor":1,)"
            R"("rope_low":1,"rope_high":4,"rope_positions":0})");
  const auto said = [](const char* preset) {
    const ModelConfig c = preset_config(preset);
    return std::tuple(c.layers, c.heads, c.dim, c.numbers.at("mlp_dim"));
  };
  EXPECT_EQ(said("pythia-70m"), std::tuple(6, 8, 512, 2048));
  EXPECT_EQ(said("pythia-410m"), std::tuple(24, 16, 1024, 4096));
  EXPECT_EQ(said("pythia-1.4b"), std::tuple(24, 16, 2048, 8192));
  EXPECT_EQ(said("pythia-6.9b"), std::tuple(32, 32, 4096, 16384));
}

// Heads of 8, of which 2 elements turn.
ModelConfig small() {
  ModelConfig config = preset_config("pythia-70m");
  config.layers = 2;
  config.heads = 3;
  config.dim = 24;
  config.vocab = 16;
  config.numbers["mlp_dim"] = 10;
  return config;
}

// A checkpoint goes on from a folder that its model was saved to.
TEST(GptNeoxModel, HasOneTextHoweverItIsMade) {
  ModelConfig changed = small();
  changed.numbers["parallel"] = 0;
  changed.numbers["tied"] = 1;
  changed.numbers["attention_bias"] = 0;
  changed.numbers["tanh_gelu"] = 1;
  changed.numbers["rope_scaling"] = 1;
  changed.numbers["rope_factor"] = 2.5;
  for (const ModelConfig& config : {small(), changed}) {
    const testing::TempFolder folder;
    folder.write("config.json", config.make()->config_text());
    EXPECT_EQ(to_text(read_model_config(folder.path())), to_text(config));
    EXPECT_EQ(to_text(parse_model_text(to_text(config), "text")), to_text(config));
  }
}

// Dropout is of a run: what is saved says it, and what is read leaves it out.
TEST(GptNeoxModel, SavesItsDropout) {
  ModelConfig config = small();
  config.dropout = 0.125;
  const std::string text = config.make()->config_text();
  EXPECT_TRUE(has(text, {R"("hidden_dropout": 0.125)", R"("attention_dropout": 0.0)"}));
  const testing::TempFolder folder;
  folder.write("config.json", text);
  EXPECT_EQ(read_model_config(folder.path()).dropout, 0);
}

struct SmallModel {
  explicit SmallModel(const ModelConfig& config) : model(config.make()) {
    engine::materialize(parameters_of(*model), memory, 1);
  }

  float loss(const Pass& pass) {
    const std::vector<std::int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
    const auto batch = engine::Tensor::from<std::int32_t>(memory, {2, 4}, tokens);
    return tape.no_grad([&] { return model->loss(tape, {batch, batch}, pass).item(); });
  }

  engine::Memory memory;
  engine::Tape tape{memory, engine::Stream::inline_cpu("compute")};
  std::unique_ptr<LanguageModel> model;
};

TEST(GptNeoxModel, DropsInTrainingAlone) {
  for (const int parallel : {0, 1}) {
    ModelConfig config = small();
    config.dropout = 0.5;
    config.numbers["parallel"] = parallel;
    SmallModel model(config);
    const float without = model.loss({.training = false});
    EXPECT_NE(model.loss({.seed = 1}), without);
    EXPECT_NE(model.loss({.seed = 1}), model.loss({.seed = 2}));
    EXPECT_EQ(model.loss({.seed = 1}), model.loss({.seed = 1}));
    EXPECT_NE(model.loss({.seed = 1, .first_sample = 2}), model.loss({.seed = 1}));
  }
}

// Where all that is added is zero but the bias of one branch, the loss shows the mask of that one.
TEST(GptNeoxModel, EveryLayerAndBranchHasAMaskOfItsOwn) {
  ModelConfig config = small();
  config.dropout = 0.5;
  std::vector<float> losses;
  for (const char* lit : {"layers.0.attention.dense.bias", "layers.1.attention.dense.bias",
                          "layers.0.mlp.dense_4h_to_h.bias", "layers.1.mlp.dense_4h_to_h.bias"}) {
    SmallModel model(config);
    for (engine::Parameter* p : parameters_of(*model.model)) {
      if (!p->name.starts_with("layers.")) continue;
      const auto values = p->value.span<float>();
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = p->name == lit ? 0.1f * static_cast<float>(1 + i) : 0.0f;
      }
    }
    losses.push_back(model.loss({.seed = 1}));
  }
  std::ranges::sort(losses);
  EXPECT_EQ(std::ranges::adjacent_find(losses), losses.end());
}

// 2 x 3 for each weight that multiplies a token, and 12 C for each pair of a token and one that it
// sees.
TEST(GptNeoxModel, CountsItsOperations) {
  const double weights = 12.0 * (4 * 768 * 768 + 2 * 768 * 3072) + 768.0 * 50304;
  const double pairs = 12 * 12.0 * 768 * 100 * 101 / 2;
  EXPECT_DOUBLE_EQ(preset_config("pythia-160m").train_flops(100), 6 * weights * 100 + pairs);
}

TEST(GptNeoxModel, RefusesSizesThatDoNotFit) {
  const auto refusal = [](const auto& change) {
    ModelConfig config = preset_config("pythia-160m");
    change(config);
    return error_of<InvalidArgument>([&] { static_cast<void>(config.make()); });
  };
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.heads = 7; }), {"model.heads (7)", "got 768"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.layers = 0; }), {"[gpt_neox]", "model.layers"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.numbers["mlp_dim"] = 0; }), {"model.mlp_dim"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.numbers["mlp_dim"] = 0.5; }), {"whole mlp_dim"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.heads = 64; }),
                  {"even number of elements of a head to turn", "3 of 12", "model.heads=64"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.heads = 256; }), {"got 0 of 3"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.numbers["rotary_pct"] = 1.5; }), {"rotary_pct"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.numbers["norm_eps"] = 0; }), {"norm_eps"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.numbers["rope_theta"] = 0; }), {"rope_theta"}));
  EXPECT_TRUE(
      has(refusal([](ModelConfig& c) { c.numbers["rope_scaling"] = 3; }), {"rope_scaling"}));
  EXPECT_TRUE(has(refusal([](ModelConfig& c) { c.dropout = 1; }), {"model.dropout"}));
}

}  // namespace
}  // namespace tessera::tools
