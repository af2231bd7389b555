#include "tools/huggingface/llama_files.h"

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
#include "tools/huggingface/model_writer.h"

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
  EXPECT_EQ(
      read(changed({{"model_type", "qwen2"}, {"use_sliding_window", true}, {"sliding_window", 40}}))
          .positions,
      40);
  EXPECT_EQ(read(changed({{"model_type", "qwen2"}, {"sliding_window", 40}})).positions, 64);
  for (const char* kind : {"qwen2", "qwen3"}) {
    json slides = changed({{"model_type", kind},
                           {"head_dim", 4},
                           {"use_sliding_window", true},
                           {"max_position_embeddings", 8192}});
    EXPECT_EQ(read(slides).positions, 4096) << kind;
    slides["sliding_window"] = nullptr;
    EXPECT_EQ(read(slides).positions, 8192) << kind;
  }
  // Keys that transformers does not read of a kind.
  const LlamaFileConfig plain =
      read(changed({{"model_type", "mistral"}, {"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_FALSE(plain.qkv_bias || plain.out_bias || plain.mlp_bias);
  EXPECT_FALSE(read(changed({{"model_type", "qwen2"}, {"mlp_bias", true}})).mlp_bias);
}

TEST(LlamaConfig, RefusesWhatWeDoNotComputeNamingTheKey) {
  const std::pair<const char*, json> cases[] = {
      {"hidden_act", "gelu"},
      {"is_causal", false},
      {"partial_rotary_factor", 0.25},
      {"layer_types", {"full_attention", "sliding_attention"}},
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
  // What versions of transformers would read from different places.
  const json theta = {{"rope_type", "default"}, {"rope_theta", 7.0}};
  EXPECT_TRUE(has(refusal(changed({{"rope_parameters", theta}, {"rope_theta", 8.0}})),
                  {"rope_theta", "outside of rope_parameters", "got 7.0"}));
  EXPECT_TRUE(has(refusal(changed({{"rope_scaling", theta}})), {"rope_theta", "10000", "got 7.0"}));
  EXPECT_TRUE(has(refusal(changed({{"rope_parameters", theta},
                                   {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}})),
                  {"rope_type", "as in rope_scaling"}));
  const std::pair<const char*, json> rotations[] = {
      {"high_freq_factor",
       {{"rope_type", "llama3"},
        {"factor", 2.0},
        {"low_freq_factor", 4.0},
        {"high_freq_factor", 4.0},
        {"original_max_position_embeddings", 8}}},
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
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 2.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8}};
  EXPECT_TRUE(
      has(refusal(changed({{"rope_scaling", llama3}, {"original_max_position_embeddings", 16}})),
          {"original_max_position_embeddings to be 8, got 16"}));
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

// Every key that makes the model, also those that no tensor's shape tells.
TEST(LlamaConfig, IsThatOfTheWeights) {
  const json scaled = {{"rope_type", "llama3"},
                       {"factor", 4.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 2.0},
                       {"original_max_position_embeddings", 8}};
  const json saved = changed({{"rope_scaling", scaled}, {"head_dim", 4}});
  const auto refusal_of = [&](const json& now) {
    const TempFolder folder;
    folder.write("config.json", testing::json_text(now));
    const std::vector<engine::TensorSpec> tensors = {{"model.norm.weight", {1}}};
    engine::SafetensorsWriter writer(folder / "model.safetensors", tensors,
                                     {{kConfigKey, testing::json_text(saved)}});
    writer.write("model.norm.weight", std::vector<float>{1});
    writer.finish();
    return error_of<IoError>(
        [&] { read_llama_config(read_folder_config(folder.path()), "llama"); });
  };
  const std::pair<const char*, json> keys[] = {
      {"num_hidden_layers", 3},
      {"num_attention_heads", 8},
      {"num_key_value_heads", 4},
      {"head_dim", 6},
      {"hidden_size", 32},
      {"intermediate_size", 5},
      {"max_position_embeddings", 128},
      {"vocab_size", 10},
      {"rms_norm_eps", 1e-5},
      {"rope_theta", 5000.0},
      {"tie_word_embeddings", true},
      {"attention_bias", true},
      {"mlp_bias", true},
  };
  for (const auto& [key, value] : keys) {
    json now = saved;
    now[key] = value;
    EXPECT_TRUE(has(refusal_of(now), {key, "files of two models"})) << key;
  }
  const std::pair<const char*, json> rotations[] = {{"factor", 5.0},
                                                    {"low_freq_factor", 0.5},
                                                    {"high_freq_factor", 3.0},
                                                    {"original_max_position_embeddings", 9}};
  for (const auto& [key, value] : rotations) {
    json now = saved;
    now["rope_scaling"][key] = value;
    EXPECT_TRUE(has(refusal_of(now), {key, "files of two models"})) << key;
  }
  json plain = saved;
  plain.erase("rope_scaling");
  EXPECT_TRUE(has(refusal_of(plain), {"rope_type", "files of two models"}));
}

// By the names that transformers gives them: what we write, read by name from its own files.
TEST(LlamaConfig, WritesTheKeysOfTransformers) {
  for (const char* name :
       {"llama_biases", "llama_scaled", "mistral_grouped", "qwen2_tied", "qwen3_biases"}) {
    const std::string path = std::string("tests/golden/llama/") + name;
    const json theirs = testing::parse_json(engine::read_text_file(path + "/config.json", 1 << 20));
    const json ours = testing::parse_json(
        llama_config_text(read_llama_config(read_folder_config(path), theirs.at("model_type"))));
    for (const auto& [key, value] : ours.items()) {
      if (key == "rope_theta") {
        EXPECT_EQ(theirs.at("rope_parameters").at(key), value) << name;
      } else if (key == "rope_scaling") {
        const json scaling = value.is_null() ? json{{"rope_type", "default"}} : value;
        for (const auto& [part, number] : scaling.items())
          EXPECT_EQ(theirs.at("rope_parameters").at(part), number) << name << " " << part;
      } else if (key == "torch_dtype") {
        EXPECT_EQ(theirs.at("dtype"), value) << name;
      } else if (theirs.contains(key)) {
        EXPECT_EQ(theirs.at(key), value) << name << " " << key;
      } else {
        EXPECT_EQ(key, "head_dim") << name;  // which Qwen2 has in no file
      }
    }
  }
}

// A config.json that does not say its kind is of no family of these.
TEST(LlamaModelFolder, ReplacesNoConfigOfAnotherModel) {
  const TempFolder folder;
  const std::vector<engine::TensorSpec> tensors = {{"norm.weight", {1}}};
  const LlamaFileConfig config = read(kConfig);
  for (const char* text : {R"({"hidden_size":768,"note":"precious"})",
                           R"({"hidden_size":768,"model_type":"bert"})", R"({"n_embd":4})"}) {
    folder.write("config.json", text);
    EXPECT_TRUE(has(error_of<IoError>([&] {
                      const ModelWriter writer(folder.path(), llama_layout("llama", true),
                                               llama_config_text(config), tensors);
                    }),
                    {"would be replaced"}));
    EXPECT_EQ(folder.read("config.json"), text);
  }
}

// Names may lack the prefix, and old versions saved a buffer that nobody needs.
TEST(LlamaModelFolder, ReadsNamesOfAllVersions) {
  const TempFolder folder;
  const std::vector<engine::TensorSpec> written = {{"layers.0.self_attn.rotary_emb.inv_freq", {2}},
                                                   {"norm.weight", {1}}};
  engine::SafetensorsWriter writer(folder / "model.safetensors", written);
  writer.write(written[0].name, std::vector<float>{1, 2});
  writer.write(written[1].name, std::vector<float>{3});
  writer.finish();
  folder.write("config.json", testing::json_text(kConfig));
  const ModelWeights weights(folder.path(), llama_layout("llama", true));
  const std::vector<engine::TensorSpec> expected = {{"norm.weight", {1}}};
  weights.check_complete(expected);
}

}  // namespace
}  // namespace tessera::tools
