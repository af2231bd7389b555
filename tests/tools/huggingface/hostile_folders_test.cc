// Folders of a Llama in shards that were damaged or forged: the error names the file, and where one
// is at fault its key or tensor.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/io/safetensors.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tools/huggingface/adapter_files.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/llama_files.h"
#include "tools/huggingface/model_index.h"
#include "tools/huggingface/model_weights.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::TensorSpec;
using nlohmann::json;
using testing::error_of;
using testing::has;
using testing::TempFolder;

const std::string kFirst = "model-00001-of-00002.safetensors";
const std::string kSecond = "model-00002-of-00002.safetensors";
const std::string kIndex{kModelIndex};

/// As programs call them.
const std::vector<TensorSpec> kModel = {{"embed_tokens.weight", {3, 4}},
                                        {"layers.0.input_layernorm.weight", {4}},
                                        {"norm.weight", {4}},
                                        {"lm_head.weight", {3, 4}}};
/// As they lie in files.
const std::vector<ModelShard> kShards = {
    {kFirst, {{"model.embed_tokens.weight", {3, 4}}, {"model.norm.weight", {4}}}},
    {kSecond, {{"model.layers.0.input_layernorm.weight", {4}}, {"lm_head.weight", {3, 4}}}}};

void write_shard(const TempFolder& folder, const ModelShard& shard) {
  engine::SafetensorsWriter writer(folder / shard.name, shard.tensors);
  for (const TensorSpec& tensor : shard.tensors) {
    writer.write(tensor.name,
                 std::vector<float>(static_cast<std::size_t>(engine::numel(tensor.shape))));
  }
  writer.finish();
}

void write_model(const TempFolder& folder, const std::vector<ModelShard>& shards = kShards) {
  folder.write("config.json", llama_config_text({.kind = "llama",
                                                 .layers = 1,
                                                 .heads = 1,
                                                 .kv_heads = 1,
                                                 .head_dim = 4,
                                                 .dim = 4,
                                                 .mlp_dim = 4,
                                                 .positions = 8,
                                                 .vocab = 3}));
  for (const ModelShard& shard : shards) write_shard(folder, shard);
  folder.write(kIndex, model_index_text(shards));
}

/// What programs do with a folder before they read a value.
void open(const TempFolder& folder) {
  const LlamaFileConfig config = read_llama_config(read_folder_config(folder.path()), "llama");
  const ModelWeights weights(folder.path(), llama_layout("llama", config.tied));
  weights.check_complete(kModel);
}

std::string refusal(const TempFolder& folder) {
  return error_of<IoError>([&] { open(folder); });
}

/// Of a model that `damage` changes.
std::string refusal_after(const std::function<void(const TempFolder&)>& damage) {
  const TempFolder folder;
  write_model(folder);
  damage(folder);
  return refusal(folder);
}

/// kShards, where `change` makes others of the tensors of the second file.
std::string refusal_of_shards(const std::function<void(std::vector<TensorSpec>&)>& change) {
  const TempFolder folder;
  std::vector<ModelShard> shards = kShards;
  change(shards[1].tensors);
  write_model(folder, shards);
  return refusal(folder);
}

std::string refusal_of_index(const std::function<void(json&)>& change) {
  return refusal_after([&](const TempFolder& folder) {
    json index = testing::parse_json(folder.read(kIndex));
    change(index.at("weight_map"));
    folder.write(kIndex, testing::json_text(index));
  });
}

TEST(HostileFolder, WithoutDamageItIsRead) {
  const TempFolder folder;
  write_model(folder);
  EXPECT_NO_THROW(open(folder));
}

TEST(HostileFolder, AShardThatWasCutShortIsNamed) {
  for (const std::string& name : {kFirst, kSecond}) {
    const TempFolder folder;
    write_model(folder);
    const std::string whole = folder.read(name);
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{5}, std::size_t{100}, whole.size() / 2, whole.size() - 1}) {
      folder.write(name, whole.substr(0, size));
      EXPECT_TRUE(has(refusal(folder), {"cut short", folder / name})) << size;
    }
    folder.write(name, whole);
    EXPECT_NO_THROW(open(folder));
  }
}

TEST(HostileFolder, WhatLiesInPlaceOfAShardIsNamed) {
  struct Kind {
    const char *text, *name, *fix;
  };
  for (const Kind& kind :
       {Kind{"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n",
             "git-lfs pointer", "git lfs pull"},
        Kind{"<!doctype html><html></html>", "HTML", "/resolve/"}}) {
    for (const std::string& name : {kFirst, kSecond, kIndex}) {
      const TempFolder folder;
      write_model(folder);
      folder.write(name, kind.text);
      EXPECT_TRUE(has(refusal(folder), {kind.name, kind.fix, folder / name}));
    }
  }
}

TEST(HostileFolder, AnIndexThatLiesIsNamedWithItsTensor) {
  EXPECT_TRUE(has(
      refusal_after([](const TempFolder& folder) { std::filesystem::remove(folder / kSecond); }),
      {"[llama]", kIndex, "no such file", "\"lm_head.weight\"", "/" + kSecond}));
  EXPECT_TRUE(has(refusal_of_index([](json& map) { map["lm_head.weight"] = kFirst; }),
                  {"[llama]", "no tensor \"lm_head.weight\"", "/" + kFirst}));
  EXPECT_TRUE(has(refusal_of_index([](json& map) { map["lm_head.weight"] = "../x.safetensors"; }),
                  {"[model]", "../x.safetensors", "\"lm_head.weight\"", "/" + kIndex}));
  EXPECT_TRUE(has(refusal_of_index([](json& map) { map.erase("lm_head.weight"); }),
                  {"[llama]", "expected 1 tensors", "got 2", "/" + kSecond}));
}

TEST(HostileFolder, TensorsThatAreNotTheModelsAreNamedWithTheirFile) {
  EXPECT_TRUE(has(refusal_of_shards([](auto& tensors) {
                    tensors[1].shape = {4, 3};
                  }),
                  {"\"lm_head.weight\" is (4, 3) of F32 and not (3, 4)", "/" + kSecond}));
  const std::string integers = refusal_after([](const TempFolder& folder) {
    std::string shard = folder.read(kSecond);
    for (std::size_t at = 0; (at = shard.find("\"F32\"", at)) != std::string::npos;) {
      shard.replace(at, 5, "\"I32\"");
    }
    folder.write(kSecond, shard);
  });
  EXPECT_TRUE(has(integers, {"\"lm_head.weight\" is (3, 4) of I32 and not (3, 4) of F32, BF16",
                             "2 differences", "/" + kSecond}));
  EXPECT_TRUE(has(refusal_of_shards([](auto& tensors) {
                    tensors.push_back({"norm.weight", {4}});
                  }),
                  {"each tensor once, got \"norm.weight\" again", "/" + kFirst, "/" + kSecond}));
  EXPECT_TRUE(
      has(refusal_of_shards([](auto& tensors) { tensors[0].name = "model.layers.0.other.weight"; }),
          {"\"layers.0.input_layernorm.weight\" (4) is missing", "\"layers.0.other.weight\" (4)"}));
  const TempFolder folder;
  std::vector<ModelShard> wrapped = kShards;
  for (ModelShard& shard : wrapped) {
    for (TensorSpec& tensor : shard.tensors) tensor.name.insert(0, "module.");
  }
  write_model(folder, wrapped);
  // The head has no "model." before it.
  const std::string error = refusal(folder);
  EXPECT_TRUE(has(error, {"the 4 tensors", "\"module.model.embed_tokens.weight\"", "4 in all",
                          "removeprefix('module.')", folder.path()}));
  EXPECT_EQ(std::ranges::count(error, '\n'), 1) << error;
}

TEST(HostileFolder, AdaptersAreCheckedAlike) {
  const TempFolder folder;
  const std::vector<TensorSpec> tensors = {{"layers.0.self_attn.q_proj.lora_A.weight", {1, 4}}};
  const ModelLayout layout = llama_layout("llama", false);
  AdapterWriter writer(folder.path(), layout,
                       AdapterConfig{.r = 1, .lora_alpha = 1, .target_modules = {"q_proj"}},
                       tensors);
  writer.write(tensors[0].name, std::vector<float>(4));
  writer.finish();
  const std::string name = kAdapterWeights, whole = folder.read(name);
  EXPECT_NO_THROW(adapter_weights(folder.path(), layout).check_complete(tensors));
  const auto refused = [&](const std::string& text) {
    folder.write(name, text);
    return error_of<IoError>([&] { adapter_weights(folder.path(), layout); });
  };
  EXPECT_TRUE(has(refused(whole.substr(0, whole.size() - 1)), {"cut short", folder / name}));
  EXPECT_TRUE(has(refused("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"),
                  {"git lfs pull", folder / name}));
}

/// The most memory that this process has held.
double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

// Of holes, which cost no disk; a limit ends it before memory is taken.
TEST(HostileFolder, AGigabyteOfJsonIsNotRead) {
  constexpr std::uintmax_t kGib = std::uintmax_t{1} << 30;
  const double before = peak_mib();
  const auto grown = [&](const TempFolder& folder, const std::string& name, const auto& read) {
    std::filesystem::resize_file(folder / name, kGib);
    return error_of<IoError>(read);
  };
  const std::string too_long = "got 1073741824 (";
  for (const auto& [name, limit] :
       {std::pair{kIndex, "at most 67108864"}, {"config.json", "at most 1048576"}}) {
    const TempFolder folder;
    write_model(folder);
    EXPECT_TRUE(has(grown(folder, name, [&] { open(folder); }), {limit, too_long, folder / name}));
  }
  const TempFolder adapter;
  adapter.write(kAdapterConfig, "{}");
  EXPECT_TRUE(has(grown(adapter, kAdapterConfig, [&] { read_adapter_config(adapter.path()); }),
                  {"at most 1048576", too_long, adapter / kAdapterConfig}));
  const std::vector<std::vector<std::string>> tokenizers = {
      {"tokenizer.json"}, {"vocab.json", "merges.txt"}, {"merges.txt", "vocab.json"}};
  for (const std::vector<std::string>& names : tokenizers) {
    const TempFolder folder;
    for (const std::string& name : names) folder.write(name, name == "vocab.json" ? "{}" : "");
    EXPECT_TRUE(has(grown(folder, names[0], [&] { Tokenizer::read(folder.path()); }),
                    {"at most 134217728", too_long, folder / names[0]}));
  }
  EXPECT_LT(peak_mib() - before, 256);
}

}  // namespace
}  // namespace tessera::tools
