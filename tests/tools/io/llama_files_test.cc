#include "tools/io/llama_files.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "engine/error.h"
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

const json kConfig = {
    {"model_type", "llama"},         {"num_hidden_layers", 2}, {"num_attention_heads", 4},
    {"num_key_value_heads", 2},      {"hidden_size", 16},      {"intermediate_size", 24},
    {"max_position_embeddings", 64}, {"vocab_size", 9}};

json changed(std::initializer_list<std::pair<const char*, json>> changes) {
  json config = kConfig;
  for (const auto& [key, value] : changes) config[key] = value;
  return config;
}

LlamaFileConfig read(const json& config) {
  const TempFolder folder;
  folder.write("config.json", testing::json_text(config));
  return read_llama_config(read_folder_config(folder.path()), config.value("model_type", "llama"));
}

std::string refusal(const json& config) {
  return error_of<IoError>([&] { read(config); });
}

TEST(LlamaConfig, ReadsSizesAndDefaults) {
  const LlamaFileConfig config = read(kConfig);
  EXPECT_EQ(config, (LlamaFileConfig{.kind = "llama",
                                     .layers = 2,
                                     .heads = 4,
                                     .kv_heads = 2,
                                     .head_dim = 4,
                                     .dim = 16,
                                     .mlp_dim = 24,
                                     .positions = 64,
                                     .vocab = 9,
                                     .norm_eps = 1e-6,
                                     .rope_theta = 10000}));
  json first = kConfig;  // as Llama 1 had it
  first.erase("num_key_value_heads");
  EXPECT_EQ(read(first).kv_heads, 4);
}

TEST(LlamaConfig, ReadsRotationsAsEachVersionOfTransformersWritesThem) {
  const LlamaFileConfig old = read(
      changed({{"rope_theta", 500000.0}, {"rope_scaling", {{"type", "linear"}, {"factor", 4.0}}}}));
  EXPECT_EQ(old.rope_theta, 500000);
  EXPECT_EQ(old.rope_scaling, (RopeFileScaling{.type = "linear", .factor = 4}));
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 32.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const RopeFileScaling scaled{
      .type = "llama3", .factor = 32, .low = 1, .high = 4, .original_positions = 8192};
  EXPECT_EQ(read(changed({{"rope_scaling", llama3}})).rope_scaling, scaled);
  json parameters = llama3;
  parameters["rope_theta"] = 7000.0;
  const LlamaFileConfig now = read(changed({{"rope_parameters", parameters}}));
  EXPECT_EQ(now.rope_theta, 7000);
  EXPECT_EQ(now.rope_scaling, scaled);
  EXPECT_EQ(read(changed({{"rope_scaling", nullptr}})).rope_scaling, RopeFileScaling());
}

TEST(LlamaConfig, KnowsWhatKindsHave) {
  const json qwen2 = changed({{"model_type", "qwen2"}, {"attention_bias", false}});
  EXPECT_TRUE(read(qwen2).qkv_bias);
  EXPECT_FALSE(read(qwen2).out_bias);
  const json qwen3 = changed({{"model_type", "qwen3"}, {"head_dim", 6}, {"attention_bias", true}});
  EXPECT_TRUE(read(qwen3).has_qk_norms());
  EXPECT_TRUE(read(qwen3).qkv_bias && read(qwen3).out_bias);
  EXPECT_EQ(read(qwen3).head_dim, 6);
  // What a token of Mistral sees bounds the sequences.
  const auto mistral = [](const json& window) {
    return read(changed({{"model_type", "mistral"},
                         {"max_position_embeddings", 8192},
                         {"sliding_window", window}}))
        .positions;
  };
  EXPECT_EQ(mistral(nullptr), 8192);
  EXPECT_EQ(mistral(100), 100);
  EXPECT_EQ(read(changed({{"model_type", "mistral"}, {"max_position_embeddings", 8192}})).positions,
            4096);
}

TEST(LlamaConfig, RefusesWhatWeDoNotComputeNamingTheKey) {
  const std::pair<const char*, json> cases[] = {
      {"hidden_act", "gelu"},
      {"use_sliding_window", true},
      {"layer_types", {"full_attention", "sliding_attention"}},
      {"pretraining_tp", 2},
      {"quantization_config", {{"bits", 4}}},
      {"attention_bias", 1},
      {"tie_word_embeddings", nullptr},
      {"num_attention_heads", 3},
      {"num_hidden_layers", 0},
      {"intermediate_size", "24"},
      {"rms_norm_eps", 0},
      {"rope_theta", -1},
      {"rope_scaling", "linear"},
  };
  for (const auto& [key, value] : cases) {
    EXPECT_TRUE(has(refusal(changed({{key, value}})), {key, "config.json"})) << key;
  }
  const std::pair<const char*, json> rotations[] = {
      {"yarn", {{"rope_type", "yarn"}, {"factor", 2.0}}},
      {"factor", {{"rope_type", "linear"}}},
      {"factor", {{"rope_type", "linear"}, {"factor", 0.5}}},
      {"original_max_position_embeddings",
       {{"rope_type", "llama3"},
        {"factor", 2.0},
        {"low_freq_factor", 1.0},
        {"high_freq_factor", 4.0}}},
  };
  for (const auto& [what, scaling] : rotations) {
    EXPECT_TRUE(has(refusal(changed({{"rope_scaling", scaling}})), {what, "rope_scaling"})) << what;
  }
  EXPECT_TRUE(has(refusal(changed({{"rope_parameters", {{"full_attention", json::object()}}}})),
                  {"rope_theta, got none", "rope_parameters"}));
  EXPECT_TRUE(has(refusal(changed({{"rope_parameters",
                                    {{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}}})),
                  {"partial_rotary_factor"}));
  json without = changed({{"model_type", "mistral"}});
  without.erase("num_key_value_heads");
  EXPECT_TRUE(has(refusal(without), {"num_key_value_heads, got none"}));
  EXPECT_TRUE(has(refusal(changed({{"model_type", "qwen3"}})), {"head_dim, got none"}));
}

TEST(LlamaConfig, IsReadAsItIsWritten) {
  const RopeFileScaling linear{.type = "linear", .factor = 3.5};
  const RopeFileScaling llama3{
      .type = "llama3", .factor = 8, .low = 0.5, .high = 2, .original_positions = 99};
  for (const char* kind : {"llama", "mistral", "qwen2", "qwen3"}) {
    for (const RopeFileScaling& scaling : {RopeFileScaling(), linear, llama3}) {
      LlamaFileConfig config = read(kConfig);
      config.kind = kind;
      config.head_dim = 6;
      config.norm_eps = 0.1 + 0.2;
      config.rope_theta = 12345.678;
      config.rope_scaling = scaling;
      config.tied = scaling.type == "linear";
      config.qkv_bias = kind == std::string("qwen2") || kind == std::string("qwen3");
      config.out_bias = kind == std::string("qwen3");
      config.mlp_bias = kind == std::string("llama");
      const TempFolder folder;
      folder.write("config.json", llama_config_text(config));
      EXPECT_EQ(read_llama_config(read_folder_config(folder.path()), kind), config) << kind;
    }
  }
}

TEST(LlamaConfig, IsThatOfTheWeights) {
  const TempFolder folder;
  folder.write("config.json", testing::json_text(changed({{"num_attention_heads", 8}})));
  const std::vector<engine::TensorSpec> tensors = {{"model.norm.weight", {1}}};
  engine::SafetensorsWriter writer(folder / "model.safetensors", tensors,
                                   {{kConfigKey, testing::json_text(kConfig)}});
  writer.write("model.norm.weight", std::vector<float>{1});
  writer.finish();
  EXPECT_TRUE(
      has(error_of<IoError>([&] { read_llama_config(read_folder_config(folder.path()), "llama"); }),
          {"num_attention_heads of 4", "got 8"}));
}

}  // namespace
}  // namespace tessera::tools
