#include "tools/huggingface/gpt2_files.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/huggingface/model_index.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using nlohmann::json;
using testing::error_of;
using testing::has;
using testing::TempFolder;

constexpr const char* kGolden = "tests/golden/gpt2_tiny";

const json kConfig = {{"model_type", "gpt2"}, {"n_layer", 1},       {"n_head", 2},
                      {"n_embd", 4},          {"n_positions", 8},   {"vocab_size", 3},
                      {"n_inner", nullptr},   {"resid_pdrop", 0.25}};

/// Two tensors, standing for a model.
const std::vector<engine::TensorSpec> kModel{{"wte.weight", {3, 4}}, {"h.0.attn.c_attn.bias", {2}}};

void write_weights(const std::string& path, const std::vector<engine::TensorSpec>& tensors,
                   float first = 0) {
  engine::SafetensorsWriter writer(path, tensors);
  for (const auto& [name, shape, dtype] : tensors) {
    std::vector<float> values(static_cast<std::size_t>(engine::numel(shape)));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
    writer.write(name, values);
  }
  writer.finish();
}

TEST(Gpt2Config, ReadsSizesAndDefaults) {
  const TempFolder folder;
  folder.write("config.json", testing::json_text(kConfig));
  EXPECT_EQ(read_gpt2_config(folder.path()), (Gpt2FileConfig{.n_layer = 1,
                                                             .n_head = 2,
                                                             .n_embd = 4,
                                                             .n_positions = 8,
                                                             .vocab_size = 3,
                                                             .layer_norm_epsilon = 1e-5,
                                                             .resid_pdrop = 0.25}));
  json old = kConfig;
  old.erase("n_positions");
  old["n_ctx"] = 9;
  folder.write("config.json", testing::json_text(old));
  EXPECT_EQ(read_gpt2_config(folder.path()).n_positions, 9);
  old["n_ctx"] = 1 << 24;
  folder.write("config.json", testing::json_text(old));
  EXPECT_EQ(read_gpt2_config(folder.path()).n_positions, 1 << 24);
}

TEST(Gpt2Config, RefusesWhatWeDoNotComputeNamingTheKey) {
  const std::pair<const char*, json> cases[] = {
      {"model_type", "gptj"},
      {"activation_function", "relu"},
      {"activation_function", "gelu"},
      {"tie_word_embeddings", false},
      {"n_inner", 17},
      {"scale_attn_weights", false},
      {"scale_attn_by_inverse_layer_idx", true},
      {"reorder_and_upcast_attn", true},
      {"add_cross_attention", true},
      {"quantization_config", {{"bits", 4}}},
      {"n_layer", 0},
      {"n_layer", -1},
      {"n_layer", 1.0},
      {"n_layer", "1"},
      {"n_layer", nullptr},
      {"n_embd", 1 << 30},
      {"n_head", 3},
      {"vocab_size", true},
      {"layer_norm_epsilon", 0},
      {"layer_norm_epsilon", "1e-5"},
      {"attn_pdrop", 1},
      {"embd_pdrop", -0.5},
      {"resid_pdrop", nullptr},
  };
  for (const auto& [key, value] : cases) {
    const TempFolder folder;
    json config = kConfig;
    config[key] = value;
    folder.write("config.json", testing::json_text(config));
    EXPECT_TRUE(has(error_of<IoError>([&] { read_gpt2_config(folder.path()); }),
                    {key, "config.json", testing::json_text(config[key])}))
        << key << " " << value;
  }
  for (const char* key : {"n_layer", "n_head", "n_embd", "vocab_size"}) {
    const TempFolder folder;
    json config = kConfig;
    config.erase(key);
    folder.write("config.json", testing::json_text(config));
    EXPECT_TRUE(
        has(error_of<IoError>([&] { read_gpt2_config(folder.path()); }), {key, "got none"}));
  }
}

TEST(Gpt2Config, RefusesFilesThatAreNotStrictJson) {
  const TempFolder folder;
  const auto refusal = [&](const std::string& text) {
    folder.write("config.json", text);
    return error_of<IoError>([&] { read_gpt2_config(folder.path()); });
  };
  EXPECT_TRUE(has(error_of<IoError>([&] { read_gpt2_config(folder.path()); }),
                  {"config.json", "No such file"}));
  EXPECT_TRUE(has(refusal(""), {"config.json"}));
  EXPECT_TRUE(has(refusal("[]"), {"an object", "config.json"}));
  EXPECT_TRUE(has(refusal(R"({"n_layer":1,"n_layer":2})"), {"\"n_layer\" twice"}));
  EXPECT_TRUE(has(refusal(R"({"a":{"b":1,"b":2}})"), {"\"b\" twice"}));
  EXPECT_TRUE(has(refusal(std::string(100'000, '[')), {"16 levels"}));
  EXPECT_TRUE(has(refusal(testing::json_text(kConfig) + std::string(1, '\0') + "x"), {"NUL"}));
  EXPECT_TRUE(has(refusal(std::string(2 << 20, ' ')), {"at most 1048576 bytes"}));
}

TEST(Gpt2Weights, TakesNamesWithAndWithoutPrefixAndIgnoresOldBuffers) {
  for (const std::string prefix : {"", "transformer."}) {
    const TempFolder folder;
    std::vector<engine::TensorSpec> tensors = kModel;
    for (auto& tensor : tensors) tensor.name.insert(0, prefix);
    tensors.push_back({prefix + "h.0.attn.bias", {1, 1, 8, 8}});
    tensors.push_back({prefix + "h.0.attn.masked_bias", {}});
    tensors.push_back({"lm_head.weight", {3, 4}});
    write_weights(folder / "model.safetensors", tensors);
    Gpt2Weights weights(folder.path());
    weights.check_complete(kModel);
    const auto found = weights.lookup(kModel[1]);
    EXPECT_EQ(std::vector(found.begin(), found.end()), (std::vector<float>{0, 1}));
    std::vector<float> part(2);
    weights.read(kModel[0], 10, part);
    EXPECT_EQ(part, (std::vector<float>{10, 11}));
  }
}

TEST(Gpt2Weights, ListsEveryDifferenceAtOnce) {
  const TempFolder folder;
  write_weights(folder / "model.safetensors",
                {{"transformer.wte.weight", {4, 3}}, {"score.weight", {1}}, {"h.1.x", {}}});
  Gpt2Weights weights(folder.path());
  EXPECT_TRUE(has(error_of<IoError>([&] { weights.check_complete(kModel); }),
                  {"4 differences", "\"wte.weight\" is (4, 3)", "not (3, 4)",
                   "\"h.0.attn.c_attn.bias\" (2) is missing", "\"score.weight\" (1) is unexpected",
                   "\"h.1.x\" () is unexpected", "model.safetensors"}));
  EXPECT_TRUE(has(error_of<IoError>([&] { weights.lookup(kModel[0]); }),
                  {"(3, 4)", "(4, 3)", "\"wte.weight\"", "model.safetensors"}));
  EXPECT_TRUE(has(error_of<IoError>([&] { weights.lookup(kModel[1]); }),
                  {"\"h.0.attn.c_attn.bias\"", "got none"}));
}

TEST(Gpt2Weights, RefusesIntegerWeights) {
  const TempFolder folder;
  const std::string header =
      R"({"wte.weight":{"dtype":"I32","shape":[3,4],"data_offsets":[0,48]},)"
      R"("h.0.attn.c_attn.bias":{"dtype":"BF16","shape":[2],"data_offsets":[48,52]}})";
  const auto n = static_cast<std::uint64_t>(header.size());
  folder.write("model.safetensors", std::string(reinterpret_cast<const char*>(&n), 8) + header +
                                        std::string(48, '\0') + std::string("\x80\x3F\x00\xC0", 4));
  Gpt2Weights weights(folder.path());
  EXPECT_TRUE(has(error_of<IoError>([&] { weights.check_complete(kModel); }),
                  {"1 difference (", "I32", "\"wte.weight\""}));
  const std::span<const float> bias = weights.lookup(kModel[1]);
  EXPECT_EQ(std::vector<float>(bias.begin(), bias.end()), (std::vector<float>{1.0f, -2.0f}));
}

TEST(Gpt2Weights, RefusesAnOutputMatrixOfItsOwn) {
  const TempFolder folder;
  std::vector<engine::TensorSpec> tensors = kModel;
  tensors.push_back({"lm_head.weight", {4, 3}});
  write_weights(folder / "model.safetensors", tensors);
  EXPECT_TRUE(has(error_of<IoError>([&] { Gpt2Weights(folder.path()).lookup(kModel[0]); }),
                  {"lm_head.weight", "wte.weight"}));
  tensors.back().shape = {3, 4};
  engine::SafetensorsWriter writer(folder / "model.safetensors", tensors);
  writer.write("wte.weight", std::vector<float>(12, 1.0f));
  writer.write("h.0.attn.c_attn.bias", std::vector<float>(2));
  std::vector<float> head(12, 1.0f);
  head.back() = 2.0f;
  writer.write("lm_head.weight", head);
  writer.finish();
  Gpt2Weights weights(folder.path());
  weights.check_complete(kModel);
  EXPECT_TRUE(
      has(error_of<IoError>([&] { weights.lookup(kModel[0]); }), {"lm_head.weight", "wte.weight"}));
  // A rank reads its part of both.
  std::vector<float> part(11);
  EXPECT_NO_THROW(weights.read(kModel[0], 0, part));
  EXPECT_THROW(weights.read(kModel[0], 1, part), IoError);
}

TEST(Gpt2Weights, ComparesAnOutputMatrixToItsLastElement) {
  const TempFolder folder;
  const std::vector<engine::TensorSpec> model{
      {"wte.weight", {1'100, 120}}};  // more than is read at a time
  const std::vector<float> same(1'100 * 120, 0.5f);
  for (const std::size_t at : {std::size_t{0}, std::size_t{65'535}, std::size_t{65'536},
                               std::size_t{131'072}, same.size() - 1, same.size()}) {
    std::vector<float> head = same;
    if (at < head.size()) head[at] = 0.25f;
    engine::SafetensorsWriter writer(folder / "model.safetensors",
                                     {model[0], {"lm_head.weight", {1'100, 120}}});
    writer.write("wte.weight", same);
    writer.write("lm_head.weight", head);
    writer.finish();
    const auto check = [&] { Gpt2Weights(folder.path()).lookup(model[0]); };
    if (at == same.size()) {
      EXPECT_NO_THROW(check());
    } else {
      EXPECT_TRUE(has(error_of<IoError>(check), {"lm_head.weight"})) << at;
    }
  }
}

TEST(Gpt2Weights, RefusesATensorUnderBothNames) {
  const TempFolder folder;
  write_weights(folder / "model.safetensors",
                {{"wte.weight", {1}}, {"transformer.wte.weight", {1}}});
  EXPECT_TRUE(
      has(error_of<IoError>([&] { Gpt2Weights{folder.path()}; }), {"once", "\"wte.weight\""}));
}

/// The index of a model in two files, with one more entry.
std::string index_of(const std::string& more) {
  return R"({"metadata":{"total_size":56},"weight_map":{"wte.weight":"a.safetensors",)"
         R"("h.0.attn.c_attn.bias":"b.safetensors")" +
         more + "}}";
}

TEST(Gpt2Weights, ReadsShards) {
  const TempFolder folder;
  write_weights(folder / "a.safetensors", {kModel[0]});
  write_weights(folder / "b.safetensors", {kModel[1]}, 5);
  folder.write("model.safetensors.index.json", index_of(""));
  Gpt2Weights weights(folder.path());
  weights.check_complete(kModel);
  EXPECT_EQ(weights.lookup(kModel[1])[1], 6.0f);
}

TEST(Gpt2Weights, RefusesAnIndexThatLeadsElsewhereOrLies) {
  const std::pair<std::string, std::string_view> cases[] = {
      {index_of(R"(,"x":"../x.safetensors")"), "../x.safetensors"},
      {index_of(R"(,"x":"/etc/x.safetensors")"), "/etc/x.safetensors"},
      {index_of(R"(,"x":"a\\x.safetensors")"), "same folder"},
      {index_of(R"(,"x":"..")"), "same folder"},
      {index_of(R"(,"x":".safetensors")"), "same folder"},
      {index_of(R"(,"x":"")"), "same folder"},
      {index_of(R"(,"x":3)"), "same folder"},
      {index_of(R"(,"x":"x\u0000.safetensors")"), "same folder"},
      {index_of(R"(,"x":"model.safetensors.index.json")"), "same folder"},
      {index_of(R"(,"x":"none.safetensors")"), "no such file: fetch"},
      {index_of(R"(,"x":"b.safetensors")"), "no tensor \"x\""},
      {index_of(R"(,"x":"c.safetensors")"), "expected 1 tensors"},
      {index_of(R"(,"y":"c.safetensors","x":"d.safetensors")"), "c.safetensors"},
      {index_of(R"(,"x":"a.safetensors","x":"b.safetensors")"), "\"x\" twice"},
      {"{}", "weight_map"},
      {R"({"weight_map":[]})", "weight_map"},
      {"", "index.json"},
  };
  for (const auto& [index, what] : cases) {
    const TempFolder folder;
    write_weights(folder / "a.safetensors", {kModel[0]});
    write_weights(folder / "b.safetensors", {kModel[1]});
    write_weights(folder / "c.safetensors", {{"x", {}}, {"y", {}}});
    write_weights(folder / "d.safetensors", {{"x", {}}});
    folder.write("model.safetensors.index.json", index);
    EXPECT_TRUE(has(error_of<IoError>([&] { Gpt2Weights{folder.path()}; }), {what})) << index;
  }
}

TEST(Gpt2Weights, RefusesATensorInTwoShards) {
  const TempFolder folder;
  write_weights(folder / "a.safetensors", {{"x", {}}});
  write_weights(folder / "b.safetensors", {{"transformer.x", {}}});
  folder.write("model.safetensors.index.json",
               R"({"weight_map":{"x":"a.safetensors","transformer.x":"b.safetensors"}})");
  EXPECT_TRUE(has(error_of<IoError>([&] { Gpt2Weights{folder.path()}; }),
                  {"once", "a.safetensors", "b.safetensors"}));
}

TEST(Gpt2Weights, NamesTheFileThatIsMissing) {
  const TempFolder folder;
  EXPECT_TRUE(has(error_of<IoError>([&] { Gpt2Weights{folder.path()}; }),
                  {"model.safetensors", "No such file"}));
}

TEST(Gpt2Writer, WritesAFolderThatReadsBackTheSame) {
  const TempFolder folder;
  const std::string path = folder / "new/model";
  const Gpt2FileConfig config{.n_layer = 1,
                              .n_head = 2,
                              .n_embd = 4,
                              .n_positions = 8,
                              .vocab_size = 3,
                              .layer_norm_epsilon = 1e-6,
                              .attn_pdrop = 0};
  Gpt2Writer writer(path, config, kModel);
  std::vector<float> wte(12);
  wte[11] = 0.1f;
  writer.write("wte.weight", wte);
  EXPECT_THROW(writer.finish(), InvalidArgument);
  writer.write("h.0.attn.c_attn.bias", std::vector<float>{1, 2});
  writer.finish();
  EXPECT_EQ(read_gpt2_config(path), config);
  Gpt2Weights weights(path);
  weights.check_complete(kModel);
  const auto back = weights.lookup(kModel[0]);
  EXPECT_EQ(std::vector(back.begin(), back.end()), wte);
  EXPECT_NE(engine::SafetensorsFile(path + "/model.safetensors").find("transformer.wte.weight"),
            nullptr);
  const auto json = testing::parse_json(folder.read("new/model/config.json"));
  EXPECT_EQ(json.at("architectures"), nlohmann::json({"GPT2LMHeadModel"}));
  EXPECT_EQ(json.at("model_type"), "gpt2");
}

TEST(Gpt2Writer, NamesATokenOfTheVocabularyAsTheEndOfText) {
  for (const auto& [vocab_size, expected] :
       {std::pair{3, 2}, {50'256, 50'255}, {50'257, 50'256}, {60'000, 50'256}}) {
    const TempFolder folder;
    Gpt2Writer writer(folder.path(), {.vocab_size = vocab_size}, {});
    writer.finish();
    const auto json = testing::parse_json(folder.read("config.json"));
    EXPECT_EQ(json.at("bos_token_id"), expected);
    EXPECT_EQ(json.at("eos_token_id"), expected);
  }
}

// Each of what no shape of a tensor tells, or only some do, in config.json beside weights that were
// saved with another.
TEST(Gpt2Writer, AConfigOfAnotherModelThanTheWeightsIsRefusedByItsKey) {
  const Gpt2FileConfig config{
      .n_layer = 2, .n_head = 2, .n_embd = 12, .n_positions = 8, .vocab_size = 3};
  const TempFolder folder;
  Gpt2Writer(folder.path(), config, {}).finish();
  ASSERT_EQ(read_gpt2_config(folder.path()).n_head, 2);
  const json saved = testing::parse_json(folder.read("config.json"));
  for (const auto& [key, other] : std::map<std::string, json>{{"n_layer", 3},
                                                              {"n_head", 3},
                                                              {"n_embd", 24},
                                                              {"n_positions", 9},
                                                              {"vocab_size", 4},
                                                              {"layer_norm_epsilon", 1e-6}}) {
    json changed = saved;
    changed[key] = other;
    folder.write("config.json", testing::json_text(changed));
    EXPECT_TRUE(has(error_of<IoError>([&] { read_gpt2_config(folder.path()); }),
                    {"[gpt2] expected " + key + " of ",
                     " in config.json, as the weights were "
                     "saved with"}))
        << key;
  }
  json dropout = saved;
  dropout["resid_pdrop"] = 0.5;  // the reader's to change
  folder.write("config.json", testing::json_text(dropout));
  EXPECT_EQ(read_gpt2_config(folder.path()).resid_pdrop, 0.5);
}

TEST(Gpt2Writer, LeavesNoShardsOfTheModelThatWasThere) {
  const TempFolder folder;
  const Gpt2FileConfig config{
      .n_layer = 1, .n_head = 2, .n_embd = 4, .n_positions = 8, .vocab_size = 3};
  const auto shard = [&] {
    write_weights(folder / "a.safetensors", {kModel[0]});
    write_weights(folder / "b.safetensors", {kModel[1]}, 5);
    folder.write("model.safetensors.index.json", index_of(""));
  };
  const auto save = [&](float value) {
    Gpt2Writer writer(folder.path(), config, kModel);
    writer.write("wte.weight", std::vector<float>(12, value));
    writer.write("h.0.attn.c_attn.bias", std::vector<float>(2, value));
    writer.finish();
  };
  folder.write("config.json", testing::json_text(kConfig));
  folder.write("other.safetensors", "x");  // of no index
  folder.write("tokenizer.json", "{}");
  for (const float value : {1.0f, 2.0f}) {  // over another config, and over the same one
    shard();
    if (value == 1) {
      EXPECT_EQ(read_model_index(folder / "model.safetensors.index.json", "gpt2").size(), 2u);
    }
    save(value);
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      names.insert(entry.path().filename().string());
    }
    EXPECT_EQ(names, (std::set<std::string>{"config.json", "model.safetensors", "other.safetensors",
                                            "tokenizer.json"}));
    EXPECT_EQ(Gpt2Weights(folder.path()).lookup(kModel[1])[0], value);
  }
  // An index of one file, which is the new one, and one that leads elsewhere.
  folder.write("kept.safetensors", "x");
  for (const std::string& index :
       {std::string(R"({"weight_map":{"wte.weight":"model.safetensors"}})"),
        std::string(R"({"weight_map":{"wte.weight":"../kept.safetensors"}})")}) {
    folder.write("model.safetensors.index.json", index);
    save(3);
    EXPECT_EQ(Gpt2Weights(folder.path()).lookup(kModel[1])[0], 3);
    EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors.index.json"));
  }
  EXPECT_EQ(folder.read("kept.safetensors"), "x");
}

// The folder that the transformers library wrote.
TEST(Gpt2Files, CopyTheModelThatTransformersWrote) {
  const Gpt2FileConfig config = read_gpt2_config(kGolden);
  EXPECT_EQ(config.n_embd, 52);
  EXPECT_EQ(config.attn_pdrop, 0);
  const engine::SafetensorsFile golden(std::string(kGolden) + "/model.safetensors");
  std::vector<engine::TensorSpec> specs;
  for (const engine::TensorInfo& tensor : golden.tensors()) {
    ASSERT_TRUE(tensor.name.starts_with("transformer."));
    specs.push_back({tensor.name.substr(12), tensor.shape});
  }
  EXPECT_EQ(specs.size(), 2u * 12 + 4);
  Gpt2Weights weights(kGolden);
  weights.check_complete(specs);

  const TempFolder folder;
  Gpt2Writer writer(folder.path(), config, specs);
  for (const engine::TensorSpec& tensor : specs) writer.write(tensor.name, weights.lookup(tensor));
  writer.finish();
  EXPECT_EQ(read_gpt2_config(folder.path()), config);
  Gpt2Weights copy(folder.path());
  copy.check_complete(specs);
  for (const engine::TensorSpec& tensor : specs) {
    const auto expected = weights.lookup(tensor), got = copy.lookup(tensor);
    EXPECT_EQ(std::memcmp(expected.data(), got.data(), expected.size_bytes()), 0) << tensor.name;
  }
}

}  // namespace
}  // namespace tessera::tools
