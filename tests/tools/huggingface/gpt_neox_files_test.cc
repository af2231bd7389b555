#include "tools/huggingface/gpt_neox_files.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/safetensors.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using nlohmann::json;
using testing::error_of;
using testing::has;
using testing::TempFolder;

// As EleutherAI's files have them, but for the sizes.
const json kConfig = {{"model_type", "gpt_neox"},
                      {"num_hidden_layers", 2},
                      {"num_attention_heads", 2},
                      {"hidden_size", 16},
                      {"intermediate_size", 24},
                      {"max_position_embeddings", 64},
                      {"vocab_size", 9},
                      {"hidden_act", "gelu"},
                      {"layer_norm_eps", 1e-5},
                      {"rotary_emb_base", 10000},
                      {"rotary_pct", 0.25},
                      {"tie_word_embeddings", false},
                      {"use_parallel_residual", true}};

json changed(std::initializer_list<std::pair<const char*, json>> changes) {
  json config = kConfig;
  for (const auto& [key, value] : changes) config[key] = value;
  return config;
}

GptNeoxFileConfig read(const json& config) {
  const TempFolder folder;
  folder.write("config.json", testing::json_text(config));
  return read_gpt_neox_config(read_folder_config(folder.path()));
}

std::string refusal(const json& config) {
  return error_of<IoError>([&] { read(config); });
}

TEST(GptNeoxConfig, ReadsSizesAndDefaults) {
  const GptNeoxFileConfig expected{.layers = 2,
                                   .heads = 2,
                                   .dim = 16,
                                   .mlp_dim = 24,
                                   .positions = 64,
                                   .vocab = 9,
                                   .norm_eps = 1e-5,
                                   .rotation = {.theta = 10000, .part = 0.25},
                                   .parallel = true,
                                   .tied = false,
                                   .attention_bias = true,
                                   .tanh_gelu = false};
  EXPECT_EQ(read(kConfig), expected);
  EXPECT_EQ(read(kConfig).rotary_dims(), 2);
  json without = kConfig;
  for (const char* key : {"hidden_act", "layer_norm_eps", "rotary_emb_base", "rotary_pct",
                          "tie_word_embeddings", "use_parallel_residual"}) {
    without.erase(key);
  }
  EXPECT_EQ(read(without), expected);
}

TEST(GptNeoxConfig, ReadsEachKey) {
  const GptNeoxFileConfig config = read(changed({{"hidden_act", "gelu_fast"},
                                                 {"layer_norm_eps", 1e-3},
                                                 {"rotary_emb_base", 500},
                                                 {"rotary_pct", 0.6},
                                                 {"attention_bias", false},
                                                 {"hidden_dropout", 0.125},
                                                 {"attention_dropout", 0.25},
                                                 {"tie_word_embeddings", true},
                                                 {"use_parallel_residual", false}}));
  EXPECT_EQ(config, (GptNeoxFileConfig{.layers = 2,
                                       .heads = 2,
                                       .dim = 16,
                                       .mlp_dim = 24,
                                       .positions = 64,
                                       .vocab = 9,
                                       .norm_eps = 1e-3,
                                       .rotation = {.theta = 500, .part = 0.6},
                                       .parallel = false,
                                       .tied = true,
                                       .attention_bias = false,
                                       .tanh_gelu = true,
                                       .hidden_dropout = 0.125}));
  EXPECT_EQ(config.rotary_dims(), 4);  // of 4.8, as transformers rounds them
}

TEST(GptNeoxConfig, ReadsRotationsAsEachVersionOfTransformersWritesThem) {
  const json linear = {{"type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(read(changed({{"rope_scaling", linear}})).rotation,
            (FileRotation{.part = 0.25, .scaling = {.type = "linear", .factor = 4}}));
  json now = kConfig;
  now.erase("rotary_pct");
  now.erase("rotary_emb_base");
  now["rope_parameters"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 16},
                            {"partial_rotary_factor", 0.5},
                            {"rope_theta", 700.0}};
  EXPECT_EQ(
      read(now).rotation,
      (FileRotation{
          .theta = 700,
          .part = 0.5,
          .scaling = {
              .type = "llama3", .factor = 8, .low = 1, .high = 4, .original_positions = 16}}));
  now["rope_parameters"] = {{"rope_theta", 700.0}};
  EXPECT_EQ(read(now).rotation, (FileRotation{.theta = 700, .part = 0.25}));
}

TEST(GptNeoxConfig, RefusesWhatWeDoNotComputeNamingTheKey) {
  const std::pair<const char*, json> cases[] = {
      {"hidden_act", "relu"},
      {"hidden_act", "gelu_python"},
      {"is_causal", false},
      {"head_dim", 4},
      {"layer_types", {"full_attention", "sliding_attention"}},
      {"quantization_config", {{"bits", 4}}},
      {"attention_bias", 1},
      {"use_parallel_residual", nullptr},
      {"tie_word_embeddings", nullptr},
      {"num_attention_heads", 3},
      {"num_hidden_layers", 0},
      {"intermediate_size", "24"},
      {"layer_norm_eps", 0},
      {"hidden_dropout", 1},
      {"attention_dropout", "0"},
      {"rotary_pct", 0.4},  // 3 of 8
      {"rotary_pct", 0.2},  // 1
      {"rotary_pct", 0.1},  // none
      {"rotary_pct", 1.25},
      {"rotary_pct", 0},
      {"rotary_emb_base", -1},
      {"rope_theta", 500},
      {"partial_rotary_factor", 0.5},
      {"rope_scaling", "linear"},
      {"yarn", nullptr},
  };
  for (const auto& [key, value] : cases) {
    const bool is_type = key == std::string("yarn");
    const json config = is_type
                            ? changed({{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}})
                            : changed({{key, value}});
    EXPECT_TRUE(has(refusal(config), {key, "config.json"})) << key << " " << value;
  }
  // What versions of transformers would read from different places.
  EXPECT_TRUE(has(refusal(changed({{"rope_parameters", {{"rope_theta", 500.0}}}})),
                  {"rope_theta", "outside of rope_parameters"}));
  EXPECT_TRUE(has(refusal(changed({{"rope_parameters", {{"partial_rotary_factor", 0.5}}}})),
                  {"partial_rotary_factor", "outside of rope_parameters"}));
  EXPECT_TRUE(has(
      refusal(changed({{"rope_scaling",
                        {{"type", "linear"}, {"factor", 2.0}, {"partial_rotary_factor", 1.0}}}})),
      {"partial_rotary_factor", "rope_scaling"}));
  json both = kConfig;
  both.erase("rotary_emb_base");
  both["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  both["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 500.0}};
  EXPECT_TRUE(has(refusal(both), {"rope_theta", "outside of rope_parameters", "got 500.0"}));
}

TEST(GptNeoxConfig, IsReadAsItIsWritten) {
  const RopeFileScaling linear{.type = "linear", .factor = 3.5};
  const RopeFileScaling llama3{
      .type = "llama3", .factor = 8, .low = 0.5, .high = 2, .original_positions = 99};
  for (const RopeFileScaling& scaling : {RopeFileScaling(), linear, llama3}) {
    for (const bool is_odd : {false, true}) {
      GptNeoxFileConfig config = read(kConfig);
      config.norm_eps = 0.1 + 0.2;
      config.rotation = {.theta = 12345.678, .part = 0.1 + 0.2, .scaling = scaling};
      config.parallel = config.attention_bias = is_odd;
      config.tied = config.tanh_gelu = !is_odd;
      config.hidden_dropout = 0.3;
      const TempFolder folder;
      folder.write("config.json", gpt_neox_config_text(config));
      EXPECT_EQ(read_gpt_neox_config(read_folder_config(folder.path())), config);
    }
  }
}

// Every key that makes the model, also those that no tensor's shape tells.
TEST(GptNeoxConfig, IsThatOfTheWeights) {
  const auto refusal_of = [](const json& now) {
    const TempFolder folder;
    folder.write("config.json", testing::json_text(now));
    const std::vector<engine::TensorSpec> tensors = {{"gpt_neox.final_layer_norm.weight", {1}}};
    engine::SafetensorsWriter writer(folder / "model.safetensors", tensors,
                                     {{kConfigKey, testing::json_text(kConfig)}});
    writer.write(tensors[0].name, std::vector<float>{1});
    writer.finish();
    return error_of<IoError>([&] { read_gpt_neox_config(read_folder_config(folder.path())); });
  };
  const std::pair<const char*, json> keys[] = {
      {"num_hidden_layers", 3},         {"num_attention_heads", 1},       {"hidden_size", 32},
      {"intermediate_size", 5},         {"max_position_embeddings", 128}, {"vocab_size", 10},
      {"layer_norm_eps", 1e-4},         {"rotary_emb_base", 5000.0},      {"rotary_pct", 0.5},
      {"use_parallel_residual", false}, {"tie_word_embeddings", true},    {"attention_bias", false},
      {"hidden_act", "gelu_new"},
  };
  for (const auto& [key, value] : keys) {
    EXPECT_TRUE(has(refusal_of(changed({{key, value}})), {key, "files of two models"})) << key;
  }
  const json linear = {{"rope_type", "linear"}, {"factor", 4.0}};
  EXPECT_TRUE(has(refusal_of(changed({{"rope_scaling", linear}})), {"rope_type"}));
  EXPECT_EQ(read(changed({{"hidden_dropout", 0.5}})).hidden_dropout, 0.5);
}

// By the names that transformers gives them: what we write, read by name from its own files.
TEST(GptNeoxConfig, WritesTheKeysOfTransformers) {
  for (const char* name : {"neox_quarter", "neox_scaled", "neox_sequential", "neox_whole"}) {
    const std::string path = std::string("tests/golden/gpt_neox/") + name;
    const json theirs = testing::parse_json(engine::read_text_file(path + "/config.json", 1 << 20));
    const json ours =
        testing::parse_json(gpt_neox_config_text(read_gpt_neox_config(read_folder_config(path))));
    const json& rotation = theirs.at("rope_parameters");
    for (const auto& [key, value] : ours.items()) {
      if (key == "rotary_emb_base") {
        EXPECT_EQ(rotation.at("rope_theta"), value) << name;
      } else if (key == "rotary_pct") {
        EXPECT_EQ(rotation.at("partial_rotary_factor"), value) << name;
      } else if (key == "rope_scaling") {
        const json scaling = value.is_null() ? json{{"rope_type", "default"}} : value;
        for (const auto& [part, number] : scaling.items())
          EXPECT_EQ(rotation.at(part), number) << name << " " << part;
      } else {
        EXPECT_EQ(theirs.at(key == "torch_dtype" ? "dtype" : key), value) << name << " " << key;
      }
    }
  }
}

// Names may lack the prefix, and old versions saved buffers that nobody needs.
TEST(GptNeoxModelFolder, ReadsNamesOfAllVersions) {
  const std::vector<engine::TensorSpec> expected = {{"layers.0.attention.dense.bias", {1}}};
  const std::vector<engine::TensorSpec> head = {{"embed_out.weight", {1}}};
  for (const std::string prefix : {"gpt_neox.", ""}) {
    const TempFolder folder;
    const std::vector<engine::TensorSpec> written = {
        {prefix + "layers.0.attention.bias", {1}},
        {prefix + "layers.0.attention.masked_bias", {1}},
        {prefix + "layers.0.attention.rotary_emb.inv_freq", {1}},
        {prefix + "rotary_emb.inv_freq", {1}},
        {prefix + "layers.0.attention.dense.bias", {1}},
        head[0]};
    engine::SafetensorsWriter writer(folder / "model.safetensors", written);
    for (const engine::TensorSpec& tensor : written) writer.write(tensor.name, std::vector{2.0f});
    writer.finish();
    const ModelWeights untied(folder.path(), gpt_neox_layout(/*tied=*/false));
    EXPECT_TRUE(has(error_of<IoError>([&] { untied.check_complete(expected); }),
                    {"1 difference", "embed_out.weight"}));
    const ModelWeights tied(folder.path(), gpt_neox_layout(/*tied=*/true));
    EXPECT_NO_THROW(tied.check_complete(expected));
    EXPECT_TRUE(has(error_of<IoError>([&] { tied.check_complete({}); }),
                    {"1 difference", "layers.0.attention.dense.bias"}));
  }
}

}  // namespace
}  // namespace tessera::tools
