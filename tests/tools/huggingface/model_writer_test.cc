// Models that are saved in shards, and what they keep of the folder that they came from.
#include "tools/huggingface/model_writer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/kept_files.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using nlohmann::json;
using testing::error_of;
using testing::has;
using testing::TempFolder;

using Names = std::set<std::string>;

const ModelLayout kLayout = [] {
  ModelLayout layout;
  layout.family = "toy";
  layout.title = "Toy";
  layout.config_key = "size";
  layout.prefix = "model.";
  return layout;
}();
// 40, 24, 80 and 16 bytes.
const std::vector<engine::TensorSpec> kTensors{
    {"a", {10}}, {"b", {2, 3}}, {"c", {20}}, {"lm_head.weight", {4}}};

std::string config_of(int size) {
  return testing::json_text(json{{"model_type", "toy"}, {"size", size}, {"eos_token_id", nullptr}});
}

void save(const std::string& folder, int size, float value, const SaveOptions& options) {
  ModelWriter writer(folder, kLayout, config_of(size), kTensors, options);
  for (const auto& [name, shape, dtype] : kTensors) {
    writer.write(name, std::vector<float>(static_cast<std::size_t>(engine::numel(shape)), value));
  }
  writer.finish();
}

// The value that all elements have.
float loaded(const std::string& folder) {
  ModelWeights weights(folder, kLayout);
  weights.check_complete(kTensors);
  const float value = weights.lookup(kTensors[0])[0];
  for (const engine::TensorSpec& tensor : kTensors) {
    for (const float x : weights.lookup(tensor)) EXPECT_EQ(x, value) << tensor.name;
  }
  return value;
}

Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

const Names kWhole = {"config.json", "model.safetensors"};
Names in_shards(int num) {
  Names names = {"config.json", "model.safetensors.index.json"};
  for (int i = 1; i <= num; ++i) {
    names.insert(fmt::format("model-{:05}-of-{:05}.safetensors", i, num));
  }
  return names;
}

TEST(ModelShards, AreFilledInOrderUpToTheirSize) {
  const std::map<std::int64_t, std::vector<std::vector<std::string>>> cases = {
      {0, {{"a", "b", "c", "d"}}},      {160, {{"a", "b", "c", "d"}}},
      {159, {{"a", "b", "c"}, {"d"}}},  {96, {{"a", "b"}, {"c", "d"}}},
      {64, {{"a", "b"}, {"c"}, {"d"}}}, {1, {{"a"}, {"b"}, {"c"}, {"d"}}}};
  for (const auto& [nbytes, expected] : cases) {
    std::vector<engine::TensorSpec> tensors = kTensors;
    tensors.back().name = "d";
    const std::vector<ModelShard> shards = cut_into_shards(tensors, nbytes);
    std::vector<std::vector<std::string>> got;
    for (const ModelShard& shard : shards) {
      got.emplace_back();
      for (const auto& tensor : shard.tensors) got.back().push_back(tensor.name);
    }
    EXPECT_EQ(got, expected) << nbytes;
  }
}

TEST(ModelWriter, WritesShardsAndTheirIndex) {
  const TempFolder folder;
  save(folder.path(), 1, 0.5f, {.shard_nbytes = 96});
  EXPECT_EQ(names_in(folder.path()), in_shards(2));
  EXPECT_EQ(testing::parse_json(folder.read("model.safetensors.index.json")),
            testing::parse_json(
                R"({"metadata": {"total_parameters": 40, "total_size": 160}, "weight_map": {
                "model.a": "model-00001-of-00002.safetensors",
                "model.b": "model-00001-of-00002.safetensors",
                "model.c": "model-00002-of-00002.safetensors",
                "lm_head.weight": "model-00002-of-00002.safetensors"}})"));
  EXPECT_EQ(loaded(folder.path()), 0.5f);
  EXPECT_EQ(folder.read("config.json"), config_of(1));
}

// Each save over each other one, with the config that is there and with another.
TEST(ModelWriter, ReplacesAModelWhateverItsFiles) {
  const std::vector<std::pair<std::int64_t, Names>> ways = {
      {0, kWhole}, {96, in_shards(2)}, {64, in_shards(3)}, {65, in_shards(3)}};
  for (const auto& [before, ignored] : ways) {
    for (const auto& [after, names] : ways) {
      for (const int size : {1, 2}) {
        const TempFolder folder;
        save(folder.path(), 1, 1, {.shard_nbytes = before});
        save(folder.path(), size, 2, {.shard_nbytes = after});
        EXPECT_EQ(names_in(folder.path()), names) << before << " " << after << " " << size;
        EXPECT_EQ(loaded(folder.path()), 2);
        EXPECT_EQ(folder.read("config.json"), config_of(size));
      }
    }
  }
}

// What a save leaves that is cut short while shards get their names.
// transformers would add it to the model without a word.
TEST(ModelWriter, RefusesTheFolderOfAnAdapter) {
  const TempFolder folder;
  folder.write("adapter_config.json", "{}");
  EXPECT_TRUE(has(testing::error_of<engine::IoError>([&] { save(folder.path(), 3, 1, {}); }),
                  {"[toy]", "got one with an adapter", "choose another folder", folder.path()}));
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
}

TEST(ModelWriter, NeverLeavesAMixtureThatLoads) {
  const TempFolder older, newer;
  save(older.path(), 1, 1, {.shard_nbytes = 96});
  save(newer.path(), 2, 2, {.shard_nbytes = 96});
  const std::string shard = "model-00001-of-00002.safetensors";
  // No index is there meanwhile.
  std::filesystem::rename(older / "model.safetensors.index.json", older / "aside");
  EXPECT_THROW(read_folder_config(older.path()), IoError);
  EXPECT_THROW(loaded(older.path()), IoError);
  std::filesystem::rename(older / "aside", older / "model.safetensors.index.json");
  // Files of two models that somebody has put together.
  std::filesystem::copy_file(newer / shard, older / shard,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(has(error_of<IoError>([&] { loaded(older.path()); }),
                  {"[toy]", "shards of one model", shard, "model-00002-of-00002.safetensors"}));
}

TEST(ModelWriter, ASaveThatIsGivenUpLeavesTheModelThatWasThere) {
  const TempFolder folder;
  save(folder.path(), 1, 1, {.shard_nbytes = 96});
  {
    ModelWriter writer(folder.path(), kLayout, config_of(2), kTensors, {.shard_nbytes = 64});
    writer.write("a", std::vector<float>(10));
    writer.write("b", std::vector<float>(6));
    writer.write("c", std::vector<float>(20));
    EXPECT_THROW(writer.finish(), engine::InvalidArgument);
  }
  EXPECT_EQ(names_in(folder.path()), in_shards(2));
  EXPECT_EQ(loaded(folder.path()), 1);
}

// The copy of config.json in the first shard is the model's where config.json is gone.
TEST(ModelWriter, ShardsSayWhatModelTheyAre) {
  const TempFolder folder;
  save(folder.path(), 3, 1, {.shard_nbytes = 64});
  std::filesystem::remove(folder / "config.json");
  const FolderConfig config = read_folder_config(folder.path());
  EXPECT_FALSE(config.file);
  ASSERT_TRUE(config.saved);
  EXPECT_EQ(config.saved->text, config_of(3));
}

TEST(KeptFiles, GoWithTheModel) {
  const TempFolder base, folder;
  base.write(
      "config.json",
      R"({"model_type": "other", "size": 7, "eos_token_id": 2, "bos_token_id": 1, "dtype": "bfloat16",
                                "rope_parameters": {}, "text": "caf\u00e9", "n": 18446744073709551615})");
  base.write("tokenizer.json", "{\"a\": 1}");
  base.write("generation_config.json", "{}");
  base.write("README.md", "of the base");
  save(folder.path(), 1, 1, {.kept = read_kept_files(base.path())});
  Names names = kWhole;
  names.insert({"tokenizer.json", "generation_config.json"});
  EXPECT_EQ(names_in(folder.path()), names);
  EXPECT_EQ(folder.read("tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(
      testing::parse_json(folder.read("config.json")),
      testing::parse_json(
          R"({"model_type": "toy", "size": 1, "eos_token_id": 2, "bos_token_id": 1, "text": "caf\u00e9",
                            "n": 18446744073709551615})"));
  EXPECT_EQ(read_folder_config(folder.path()).saved->text, folder.read("config.json"));
  // A model replaces those of another one.
  base.write("tokenizer.json", "{\"b\": 2}");
  save(folder.path(), 1, 2, {.kept = read_kept_files(base.path())});
  EXPECT_EQ(folder.read("tokenizer.json"), "{\"b\": 2}");
  // And may be saved where it came from.
  save(folder.path(), 1, 3, {.kept = read_kept_files(folder.path())});
  EXPECT_EQ(names_in(folder.path()), names);
  EXPECT_EQ(loaded(folder.path()), 3);
}

// What config.json leaves out on purpose is not that of the base: only ids of tokens are.
TEST(KeptFiles, SayNothingOfWhatIsComputed) {
  const std::string own = R"({"size": 1, "rope_scaling": null, "eos_token_id": 3})";
  const std::string kept =
      R"({"size": 2, "rope_scaling": {"factor": 8}, "eos_token_id": [4, 5], "pad_token_id": 6})";
  EXPECT_EQ(testing::parse_json(with_kept_keys(own, kept)),
            testing::parse_json(
                R"({"size": 1, "rope_scaling": null, "eos_token_id": [4, 5], "pad_token_id": 6})"));
}

// Of two tokenizers none is made of both.
TEST(KeptFiles, RemoveThoseOfTheTokenizerThatWasThere) {
  const TempFolder base, folder;
  base.write("tokenizer.json", "new");
  save(folder.path(), 1, 1, {});
  for (const char* name : {"tokenizer.json", "merges.txt", "notes.txt"}) folder.write(name, "old");
  save(folder.path(), 1, 2, {});
  EXPECT_EQ(folder.read("merges.txt"), "old") << "a model without a tokenizer has no say";
  save(folder.path(), 1, 3, {.kept = read_kept_files(base.path())});
  Names names = kWhole;
  names.insert({"tokenizer.json", "notes.txt"});
  EXPECT_EQ(names_in(folder.path()), names);
  EXPECT_EQ(folder.read("tokenizer.json"), "new");
  EXPECT_EQ(loaded(folder.path()), 3);
}

// A save that was cut short is repeated.
TEST(KeptFiles, ReplaceThoseOfAModelWhoseConfigIsAside) {
  const TempFolder base, folder;
  base.write("tokenizer.json", "new");
  save(folder.path(), 1, 1, {});
  folder.write("tokenizer.json", "old");
  std::filesystem::rename(folder / "config.json", folder / "config.json.replaced");
  save(folder.path(), 2, 2, {.kept = read_kept_files(base.path())});
  EXPECT_EQ(folder.read("tokenizer.json"), "new");
  EXPECT_EQ(loaded(folder.path()), 2);
}

TEST(ModelWriter, FindsWhatCannotBeReplacedBeforeItWrites) {
  for (const char* name :
       {"model.safetensors.index.json", "model-00002-of-00002.safetensors", "tokenizer.json"}) {
    const TempFolder base, folder;
    base.write("tokenizer.json", "{}");
    save(folder.path(), 1, 1, {});
    std::filesystem::create_directory(folder / name);
    const SaveOptions options{.shard_nbytes = 96, .kept = read_kept_files(base.path())};
    EXPECT_TRUE(has(error_of<IoError>([&] {
                      ModelWriter(folder.path(), kLayout, config_of(1), kTensors, options);
                    }),
                    {"regular file", name}));
  }
}

TEST(KeptFiles, ReplaceNoFileThatIsOfNoModel) {
  const TempFolder base, folder;
  base.write("vocab.json", "{}");
  folder.write("vocab.json", "words that somebody has collected");
  EXPECT_TRUE(has(
      error_of<IoError>([&] { save(folder.path(), 1, 1, {.kept = read_kept_files(base.path())}); }),
      {"vocab.json that is of no model", folder / "vocab.json"}));
  EXPECT_EQ(names_in(folder.path()), Names{"vocab.json"});
}

TEST(KeptFiles, AreNoneOfAnEmptyFolder) {
  const TempFolder base;
  EXPECT_TRUE(read_kept_files(base.path()).files.empty());
  EXPECT_EQ(read_kept_files("").config_text, "");
  EXPECT_EQ(with_kept_keys("as it is", ""), "as it is");
  EXPECT_THROW(with_kept_keys("{}", "[]"), IoError);
}

}  // namespace
}  // namespace tessera::tools
