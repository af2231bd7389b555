// Folders of adapters in PEFT's layout: what is read, what is refused by its key, and what is there
// while files are replaced.
#include "tools/huggingface/adapter_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using nlohmann::json;
using testing::error_of;
using testing::has;

class AdapterFiles : public ::testing::Test {
 protected:
  /// What PEFT writes, with `changes`.
  AdapterConfig read(const json& changes) const {
    json config = testing::parse_json(folder_.read("peft.json"));
    config.update(changes);
    folder_.write("adapter_config.json", testing::json_text(config));
    return read_adapter_config(folder_.path());
  }
  AdapterFiles() {
    folder_.write("peft.json", R"({
        "alora_invocation_tokens": null, "alpha_pattern": {}, "auto_mapping": null,
        "base_model_name_or_path": "/base", "bias": "none", "corda_config": null,
        "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
        "init_lora_weights": true, "layer_replication": null, "layers_pattern": null,
        "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 16, "lora_bias": false,
        "lora_dropout": 0.05, "megatron_config": null, "megatron_core": "megatron.core",
        "modules_to_save": null, "peft_type": "LORA", "peft_version": "0.21.2",
        "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": null,
        "target_modules": ["v_proj", "q_proj"], "target_parameters": null,
        "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_dora": false,
        "use_qalora": false, "use_rslora": false})");
  }

  const testing::TempFolder folder_;
};

TEST_F(AdapterFiles, AreReadAsPeftWritesThem) {
  const AdapterConfig config = read(json::object());
  EXPECT_EQ(config, (AdapterConfig{.r = 8,
                                   .lora_alpha = 16,
                                   .lora_dropout = 0.05,
                                   .target_modules = {"v_proj", "q_proj"},
                                   .base = "/base"}));
  EXPECT_EQ(read({{"target_modules", "all-linear"}}).target_modules,
            std::vector<std::string>{"all-linear"});
  EXPECT_TRUE(read({{"use_rslora", true}}).use_rslora);
  EXPECT_EQ(read({{"lora_alpha", 0.5}}).lora_alpha, 0.5);
  EXPECT_EQ(read({{"base_model_name_or_path", nullptr}}).base, "");
  // What a newer version has more says nothing where it is off.
  EXPECT_EQ(
      read({{"use_what_is_new", false}, {"new_config", nullptr}, {"new_list", json::array()}}),
      config);
  // What is written is what is read.
  for (const AdapterConfig& c :
       {config, AdapterConfig{1, 0.25, 0, true, true, {"a.b", "c\"d"}, ""}}) {
    folder_.write("adapter_config.json", adapter_config_text(c));
    EXPECT_EQ(read_adapter_config(folder_.path()), c);
  }
}

TEST_F(AdapterFiles, WhatIsNotComputedIsRefusedByItsKey) {
  const std::string path = folder_ / "adapter_config.json";
  const json not_computed = {{"use_dora", true},
                             {"modules_to_save", json::array({"lm_head"})},
                             {"rank_pattern", json{{"q_proj", 4}}},
                             {"alpha_pattern", json{{"q_proj", 4}}},
                             {"layers_to_transform", json::array({1})},
                             {"lora_bias", true},
                             {"trainable_token_indices", json::array({1})},
                             {"use_what_is_new", true}};
  for (const auto& [key, value] : not_computed.items()) {
    const json change = {{key, value}};
    EXPECT_TRUE(has(error_of<IoError>([&] { read(change); }),
                    {"[lora] expected adapters without " + key + ", which is not computed here",
                     "(" + path + ")"}));
  }
  const json wrong = {
      {"peft_type", "LOHA"},     {"bias", "all"},     {"r", 0},
      {"lora_alpha", "x"},       {"lora_dropout", 1}, {"init_lora_weights", "pissa"},
      {"target_modules", ".*q"}, {"use_rslora", 1},   {"base_model_name_or_path", 3}};
  for (const auto& [key, value] : wrong.items()) {
    const json change = {{key, value}};
    EXPECT_TRUE(has(error_of<IoError>([&] { read(change); }), {"[lora]", key, path}));
  }
  for (const json& targets : {json::array(), json::array({1}), json()}) {
    EXPECT_TRUE(has(error_of<IoError>([&] {
                      read({{"target_modules", targets}});
                    }),
                    {"target_modules", "a list of names, or \"all-linear\""}));
  }
  folder_.write("adapter_config.json", "[");
  EXPECT_TRUE(has(error_of<IoError>([&] { read_adapter_config(folder_.path()); }), {path}));
  std::filesystem::remove(path);
  EXPECT_TRUE(has(error_of<IoError>([&] { read_adapter_config(folder_.path()); }),
                  {"expected a folder of PEFT's with adapter_config.json, got none"}));
}

// The weights of one are never beside the config of another.
TEST_F(AdapterFiles, AreReplacedTogether) {
  ModelLayout layout;
  layout.prefix = "model.";
  const std::vector<engine::TensorSpec> tensors = {{"m.lora_A.weight", {1, 2}}};
  const std::vector<float> values = {1, 2};
  const auto write = [&](double alpha) {
    auto writer = std::make_unique<AdapterWriter>(
        folder_ / "out", layout,
        AdapterConfig{.r = 1, .lora_alpha = alpha, .target_modules = {"m"}}, tensors);
    writer->write("m.lora_A.weight", values);
    return writer;
  };
  write(3)->finish();
  const std::string config = folder_.read("out/adapter_config.json");
  write(5).reset();  // not finished
  EXPECT_EQ(folder_.read("out/adapter_config.json"), config);
  // What stands in the way of the weights leaves no config.
  const auto blocked = write(5);
  std::filesystem::remove(folder_ / "out/adapter_model.safetensors");
  std::filesystem::create_directories(folder_ / "out/adapter_model.safetensors/x");
  EXPECT_THROW(blocked->finish(), IoError);
  EXPECT_FALSE(has_adapter_config(folder_ / "out"));
  std::filesystem::remove_all(folder_ / "out/adapter_model.safetensors");
  write(5)->finish();
  EXPECT_EQ(read_adapter_config(folder_ / "out").lora_alpha, 5);
  folder_.write("out/config.json", "{}");
  EXPECT_TRUE(has(error_of<IoError>([&] { write(3); }),
                  {"expected a folder for adapters, got one with a whole model"}));
}

}  // namespace
}  // namespace tessera::tools
