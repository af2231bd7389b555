// Folders and files that are no model, as a person gives them by mistake.
#include "tools/huggingface/model_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/huggingface/gpt2_files.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::TensorSpec;
using testing::error_of;
using testing::has;
using testing::TempFolder;

const std::string kConfig = R"({"model_type":"gpt2","n_layer":12,"n_head":1,"n_embd":2,)"
                            R"("n_positions":4,"vocab_size":3})";

/// The tensors of a model of 12 layers, as far as a test needs them.
std::vector<TensorSpec> layers(const std::string& prefix, std::int64_t num_layers = 12) {
  std::vector<TensorSpec> tensors = {{prefix + "wte.weight", {3, 2}}};
  for (std::int64_t i = 0; i < num_layers; ++i) {
    for (const char* name : {"ln_1.weight", "attn.c_attn.weight", "mlp.c_fc.bias"}) {
      tensors.push_back({fmt::format("{}h.{}.{}", prefix, i, name), {2}});
    }
  }
  return tensors;
}

void write_weights(const std::string& path, const std::vector<TensorSpec>& tensors) {
  engine::SafetensorsWriter writer(path, tensors);
  for (const TensorSpec& tensor : tensors) {
    writer.write(tensor.name,
                 std::vector<float>(static_cast<std::size_t>(engine::numel(tensor.shape))));
  }
  writer.finish();
}

std::string difference(const std::vector<TensorSpec>& there,
                       const std::vector<TensorSpec>& expected = layers("")) {
  const TempFolder folder;
  write_weights(folder / "model.safetensors", there);
  return error_of<IoError>([&] { Gpt2Weights(folder.path()).check_complete(expected); });
}

std::string config_error(const TempFolder& folder) {
  return error_of<IoError>([&] { read_gpt2_config(folder.path()); });
}

TEST(ModelFolder, WeightsOfAnotherFormatAloneAreSaid) {
  // With what makes a model of each: transformers loads some of them only by another call.
  const std::pair<const char*, const char*> fixes[] = {
      {"pytorch_model.bin", "from_pretrained(FOLDER).save_pretrained(OTHER, safe"},
      {"pytorch_model.bin.index.json", "from_pretrained(FOLDER).save_pretrained(OTHER, safe"},
      {"model.pt", "by the program that wrote it"},
      {"tf_model.h5", "from_pretrained(FOLDER, from_tf=True).save_pretrained(OTHER)"},
      {"flax_model.msgpack", "from_pretrained(FOLDER, from_flax=True).save_pretrained(OTHER)"},
      {"gpt2.gguf", "from_pretrained(FOLDER, gguf_file=\"gpt2.gguf\").save_pretrained(OTHER)"},
      {"adapter_model.safetensors", "--lora.from (training) or --adapter"},
      {"consolidated.00.pth", "made for transformers"},
      {"consolidated.safetensors", "made for transformers"}};
  for (const auto& [name, fix] : fixes) {
    const TempFolder folder;
    folder.write("config.json", kConfig);
    folder.write(name, "weights");
    EXPECT_TRUE(has(config_error(folder), {"expected model.safetensors", name, fix}))
        << config_error(folder);
    write_weights(folder / "model.safetensors", layers(""));
    EXPECT_NO_THROW(read_gpt2_config(folder.path())) << name;
  }
  const TempFolder several;
  several.write("config.json", kConfig);
  for (const char* name : {"flax_model.msgpack", "optimizer.pt", "pytorch_model.bin",
                           "rust_model.ot", "tf_model.h5", "training_args.bin"}) {
    several.write(name, "weights");
  }
  EXPECT_TRUE(has(config_error(several), {"pytorch_model.bin and 2 more alone", "FOLDER).save"}));
  const TempFolder folder;
  folder.write("config.json", kConfig);
  folder.write("other.safetensors", "weights");
  EXPECT_TRUE(has(config_error(folder), {"other.safetensors alone", "give it that name"}));
}

TEST(ModelFolder, WhatIsNoModelFolderIsSaid) {
  const TempFolder folder;
  const std::string file = folder.write("model.safetensors", "");
  EXPECT_TRUE(has(error_of<IoError>([&] { read_gpt2_config(file); }),
                  {"expected a folder, got a file", "config.json"}));
  EXPECT_TRUE(has(error_of<IoError>([&] { read_gpt2_config(folder / "openai/gpt2"); }),
                  {"hf download NAME --local-dir", "openai/gpt2"}));
  std::filesystem::create_directories(folder / "run/checkpoints");
  EXPECT_TRUE(has(error_of<IoError>([&] { read_gpt2_config(folder / "run"); }),
                  {"got the folder of a run", "//tools:convert, --from=", "run/checkpoints ("}));
  for (const char* name : {"manifest.json", "step_20"}) {
    const TempFolder checkpoint;
    checkpoint.write(name, "");
    EXPECT_TRUE(has(config_error(checkpoint), {"a checkpoint", "--resume", "//tools:convert"}));
  }
}

TEST(ModelFolder, AnotherKindOfFileUnderTheNameIsSaid) {
  const std::pair<std::string, std::string> kinds[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"},
      {"<!doctype html><html></html>", "/resolve/"},
      {std::string("PK\3\4\0\0\0\0archive/data.pkl", 24), "safetensors.torch.save_model"},
      {"\x1f\x8b\x08", "gunzip"}};
  for (const auto& [text, fix] : kinds) {
    const TempFolder folder;
    folder.write("config.json", kConfig);
    folder.write("model.safetensors", text);
    EXPECT_TRUE(has(config_error(folder), {"expected safetensors", fix, "model.safetensors"}));
    EXPECT_TRUE(has(error_of<IoError>([&] { Gpt2Weights{folder.path()}; }), {fix}));
    folder.write("config.json", text);
    std::filesystem::remove(folder / "model.safetensors");
    EXPECT_TRUE(has(config_error(folder), {"expected JSON", fix, "config.json"}));
    folder.write("model.safetensors.index.json", text);
    EXPECT_TRUE(
        has(error_of<IoError>([&] { Gpt2Weights{folder.path()}; }), {"expected JSON", fix}));
  }
}

TEST(ModelFolder, AFileThatWasCutShortIsSaid) {
  const TempFolder folder;
  folder.write("config.json", kConfig);
  write_weights(folder / "model.safetensors", layers(""));
  const std::string whole = folder.read("model.safetensors");
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{5}, std::size_t{200}, whole.size() - 1}) {
    folder.write("model.safetensors", whole.substr(0, size));
    EXPECT_TRUE(has(config_error(folder), {"cut short", "model.safetensors"})) << size;
  }
}

TEST(TensorNames, APrefixOfAllIsSaidOnce) {
  for (const std::string prefix : {"module.", "_orig_mod.", "module.transformer."}) {
    const std::string error = difference(layers(prefix));
    EXPECT_TRUE(has(
        error, {"the 37 tensors", "74 differences", "\"" + prefix + "wte.weight\"", "37 in all"}));
    EXPECT_TRUE(has(error, {"removeprefix('" + prefix.substr(0, prefix.find('.') + 1) + "')"}));
    EXPECT_EQ(std::ranges::count(error, '\n'), 1) << error;
  }
  // As transformers saves what PyTorch's wrappers hold: an output matrix and old buffers as well.
  std::vector<TensorSpec> wrapped = layers("module.transformer.");
  wrapped.push_back({"module.lm_head.weight", {3, 2}});
  wrapped.push_back({"module.transformer.h.0.attn.bias", {1, 1, 4, 4}});
  wrapped.push_back({"module.transformer.h.0.attn.masked_bias", {1}});
  const std::string of_wrapped = difference(wrapped);
  EXPECT_EQ(std::ranges::count(of_wrapped, '\n'), 1) << of_wrapped;
  EXPECT_TRUE(has(of_wrapped, {"removeprefix('module.')"}));
  const TempFolder folder;
  write_weights(folder / "model.safetensors", layers("transformer."));
  EXPECT_NO_THROW(Gpt2Weights(folder.path()).check_complete(layers("")));
  // What differs besides is listed after it.
  std::vector<TensorSpec> there = layers("module.");
  there[1].name = "module.h.0.ln1.weight";
  EXPECT_TRUE(has(difference(there), {"36 in all",
                                      "\"h.0.ln_1.weight\" (2) is missing; there is "
                                      "\"module.h.0.ln1.weight\" (2)"}));
}

TEST(TensorNames, NamesStandSideBySideTheNearestFirst) {
  std::vector<TensorSpec> there = layers("");
  there[0].name = "wte.weights";
  there[1].name = "h.0.ln_one.weight";
  there[5].name = "h.1.attn.attn_c.weight";
  const std::string error = difference(there);
  const std::size_t first =
      error.find("\"wte.weight\" (3, 2) is missing; there is \"wte.weights\"");
  const std::size_t second =
      error.find("\"h.0.ln_1.weight\" (2) is missing; there is \"h.0.ln_one");
  const std::size_t third =
      error.find("\"h.1.attn.c_attn.weight\" (2) is missing; there is \"h.1.attn.a");
  EXPECT_TRUE(first < second && second < third && third < error.size()) << error;
  EXPECT_TRUE(has(error, {"6 differences"}));
}

TEST(TensorNames, TheListIsShort) {
  std::vector<TensorSpec> there = {{"model.embed.weight", {9, 9}}};
  for (int i = 0; i < 40; ++i) there.push_back({fmt::format("layer_{}/kernel", i), {1}});
  const std::string error = difference(there);
  EXPECT_LE(std::ranges::count(error, '\n'), 9) << error;
  EXPECT_TRUE(has(error, {"78 differences", "\"wte.weight\" (3, 2) is missing\n",
                          "\"layer_0/kernel\" (1) is unexpected\n", "and 70 more"}));
  const std::string fewer = difference(layers("", 11));
  EXPECT_TRUE(has(fewer, {"3 differences", "\"h.11.ln_1.weight\" (2) is missing"}));
}

}  // namespace
}  // namespace tessera::tools
