// Checkpoints to models of Hugging Face, and back.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/safetensors.h"
#include "shard/checkpoint/reader.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/small_models.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/convert/newest_checkpoint.h"
#include "tools/models/family.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::has;
using testing::Outcome;

std::string digest(const Outcome& outcome) {
  const auto at = outcome.out.find("sha256 ");
  EXPECT_NE(at, std::string::npos) << outcome.err;
  return at == std::string::npos ? "" : outcome.out.substr(at, 71);
}

/// Shape and values by name.
using Tensors = std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<float>>>;

Tensors tensors_of(const std::string& folder) {
  Tensors tensors;
  const engine::SafetensorsFile file(folder + "/model.safetensors");
  for (const engine::TensorInfo& tensor : file.tensors()) {
    auto& [shape, values] = tensors[tensor.name];
    shape = tensor.shape;
    values.resize(static_cast<std::size_t>(engine::numel(shape)));
    file.read(tensor, 0, values);
  }
  return tensors;
}

class Convert : public testing::TinyTraining {
 protected:
  Outcome convert(const std::string& from, const std::string& to) const {
    return testing::run_program("tools/convert/convert",
                                testing::Flags{{"from", folder_ / from}, {"to", folder_ / to}});
  }
};

TEST_F(Convert, ACheckpointBecomesTheModelThatTrainingSaves) {
  const Outcome trained =
      run({{"save.final", folder_ / "model"}, {"checkpoint.every", "2"}, {"parallel.ranks", "3"}});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  const Outcome there = convert("run/checkpoints", "converted");
  EXPECT_EQ(there.exit_code, 0) << there.err;
  EXPECT_TRUE(has(there.out, {"model of step 3 in "}));
  for (const std::string file : {"model.safetensors", "config.json"}) {
    EXPECT_TRUE(folder_.read("converted/" + file) == folder_.read("model/" + file)) << file;
  }
  const Outcome back = convert("converted", "checkpoints");
  EXPECT_EQ(back.exit_code, 0) << back.err;
  EXPECT_TRUE(has(back.out, {"checkpoint of step 0 in ", "--checkpoint.strict=false"}));
  EXPECT_EQ(convert("checkpoints/step_0", "again").exit_code, 0);
  EXPECT_TRUE(folder_.read("again/model.safetensors") == folder_.read("model/model.safetensors"));
  // Training goes on from it as from the model.
  const Outcome resumed =
      run({{"resume", folder_ / "checkpoints"}, {"checkpoint.strict", "false"}});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  const Outcome started = run({{"init.from", folder_ / "model"}});
  EXPECT_EQ(digest(resumed), digest(started));
}

TEST_F(Convert, AModelOfEachFamilyBecomesACheckpointAndAModelAgain) {
  for (const testing::SmallModel& model : testing::small_model_of_each_family()) {
    SCOPED_TRACE(model.family);
    const std::string all = model.family + "/";
    fs::create_directory(folder_ / model.family);
    flags_ = starting_from(model, flags_);
    flags_["out"] = folder_ / (all + "run");
    const Outcome trained = run({{"save.final", folder_ / (all + "model")},
                                 {"checkpoint.every", "2"},
                                 {"parallel.ranks", "3"}});
    ASSERT_EQ(trained.exit_code, 0) << trained.err;
    const Outcome there = convert(all + "run/checkpoints", all + "converted");
    ASSERT_EQ(there.exit_code, 0) << there.err;
    const Tensors converted = tensors_of(folder_ / (all + "converted"));
    EXPECT_TRUE(converted == tensors_of(folder_ / (all + "model")));
    // What has learned has the names and shapes of what it was made of, and other values.
    const Tensors before = tensors_of(model.path);
    EXPECT_EQ(converted.size(), before.size());
    for (const auto& [name, tensor] : before) {
      ASSERT_TRUE(converted.contains(name)) << name;
      EXPECT_EQ(converted.at(name).first, tensor.first) << name;
      EXPECT_NE(converted.at(name).second, tensor.second) << name;
    }
    EXPECT_EQ(to_text(tools::read_model_config(folder_ / (all + "converted"))),
              to_text(tools::read_model_config(model.path)));
    ASSERT_EQ(convert(all + "converted", all + "checkpoints").exit_code, 0);
    ASSERT_EQ(convert(all + "checkpoints/step_0", all + "again").exit_code, 0);
    EXPECT_TRUE(folder_.read(all + "again/model.safetensors") ==
                folder_.read(all + "converted/model.safetensors"));
    // Training goes on from it as from the model.
    const Outcome resumed =
        run({{"resume", folder_ / (all + "checkpoints")}, {"checkpoint.strict", "false"}});
    const Outcome started = run({{"init.from", folder_ / (all + "model")}});
    EXPECT_EQ(digest(resumed), digest(started));
  }
}

// As a run does that saves the next one while this one is read: between the manifest and the
// values.
TEST_F(Convert, ACheckpointThatIsRemovedMeanwhileIsTheNextOneOrAnError) {
  ASSERT_EQ(run({{"checkpoint.every", "1"}}).exit_code, 0);
  const std::string folder = folder_ / "run/checkpoints";
  fs::rename(folder + "/step_3", folder_ / "later");
  std::vector<std::int64_t> steps;
  const auto read = [&](const std::string& path) {
    shard::CheckpointReader reader(path);
    if (reader.manifest().step < 3) {
      if (steps.empty()) fs::rename(folder_ / "later", folder + "/step_3");
      fs::remove_all(path);
    }
    steps.push_back(reader.manifest().step);
    for (std::size_t f = 0; f < reader.manifest().files.size(); ++f) reader.check_header(f);
    steps.push_back(0);
  };
  tools::read_newest(folder, read);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{2, 3, 0}));
  // No other one was asked for.
  EXPECT_TRUE(
      has(testing::error_of<engine::IoError>([&] { tools::read_newest(folder + "/step_1", read); }),
          {"stays while it is read, got one that is gone", "/step_1)", "safetensors"}));
  // One that is damaged is not gone.
  EXPECT_EQ(testing::error_of<engine::IoError>([&] {
              tools::read_newest(folder, [](const auto&) { engine::fail<engine::IoError>("no"); });
            }),
            "no");
}

TEST_F(Convert, TheNewestThatVerifiesIsTakenAndTheOthersArePassedOverAloud) {
  ASSERT_EQ(
      run({{"checkpoint.every", "1"}, {"checkpoint.keep", "0"}, {"train.steps", "4"}}).exit_code,
      0);
  const std::string folder = folder_ / "run/checkpoints";
  const auto model_of = [&](const std::string& from) {
    const Outcome outcome = convert(from, "model");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome;
  };
  EXPECT_EQ(model_of("run/checkpoints/step_2").err, "");
  const std::string expected = folder_.read("model/model.safetensors");
  // Step 4 has a damaged value, step 3 a damaged header of a file, and step 9 is a copy of step 1.
  const auto damage = [&](const std::string& file, std::size_t at) {
    std::string bytes = folder_.read("run/checkpoints/" + file);
    bytes.at(at) ^= 4;
    folder_.write("run/checkpoints/" + file, bytes);
    return bytes;
  };
  const std::string values = "step_4/model-00001-of-00002.safetensors";
  damage(values, folder_.read("run/checkpoints/" + values).size() - 5);
  damage("step_3/model-00000-of-00002.safetensors", 12);
  fs::copy(folder + "/step_1", folder + "/step_9", fs::copy_options::recursive);
  const Outcome outcome = model_of("run/checkpoints");
  EXPECT_TRUE(has(outcome.out, {"model of step 2 in "}));
  EXPECT_TRUE(
      has(outcome.err, {"warning: passed over: step_9 is in fact the checkpoint of step 1 (",
                        "warning: passed over: [checkpoint] expected", "got damaged ones", values,
                        "expected the header that was written, got a damaged one (",
                        "step_3/model-00000-of-00002.safetensors"}));
  EXPECT_TRUE(folder_.read("model/model.safetensors") == expected);
  // One that is asked for by its path is refused, a damaged header too.
  const Outcome header = convert("run/checkpoints/step_3", "other");
  EXPECT_EQ(header.exit_code, 1);
  EXPECT_TRUE(has(header.err, {"error: [checkpoint] expected the header that was written"}));
  EXPECT_FALSE(fs::exists(folder_ / "other/model.safetensors"));
  // That nothing can be written is not the checkpoint's fault.
  folder_.write("file", "x");
  const Outcome nowhere = convert("run/checkpoints/step_2", "file/model");
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_EQ(nowhere.err.find("passed over"), std::string::npos) << nowhere.err;
  for (const char* step : {"step_1", "step_2"}) fs::remove_all(folder + "/" + step);
  const Outcome none = convert("run/checkpoints", "none");
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_TRUE(has(none.err, {"error: [checkpoint] expected a checkpoint that verifies, got none",
                             "step_9 is in fact"}));
}

// Before its weights are read, which would end the process without a word.
TEST_F(Convert, AModelThatTheMachineCannotHoldIsRefused) {
  fs::create_directory(folder_ / "large");
  folder_.write("large/config.json",
                R"({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8192,
                    "n_positions": 8, "vocab_size": 16000000})");
  const Outcome outcome = convert("large", "checkpoint");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(
      has(outcome.err, {"error: [memory] expected 491.3 GiB of memory for the whole model in "
                        "f32, got ",
                        " that are free: "}))
      << outcome.err;
  EXPECT_FALSE(fs::exists(folder_ / "checkpoint"));
}

TEST_F(Convert, WhatCannotBeConvertedIsRefusedAndNothingIsLost) {
  ASSERT_EQ(run({{"save.final", folder_ / "base"}, {"train.steps", "1"}}).exit_code, 0);
  ASSERT_EQ(run({{"checkpoint.every", "3"}}).exit_code, 0);
  const std::string before = folder_.read("base/model.safetensors");
  const Outcome onto_base = testing::run_program(
      "tools/convert/convert", testing::Flags{{"from", folder_ / "run/checkpoints"},
                                              {"base", folder_ / "base"},
                                              {"to", folder_ / "base"}});
  EXPECT_EQ(onto_base.exit_code, 1);
  EXPECT_TRUE(has(onto_base.err, {"expected another folder than the model's own", "/base (to)"}));
  EXPECT_EQ(folder_.read("base/model.safetensors"), before);
  const std::string name = "run/checkpoints/step_3/model-00001-of-00002.safetensors";
  std::string bytes = folder_.read(name);
  bytes[bytes.size() - 5] ^= 4;
  folder_.write(name, bytes);
  const Outcome damaged = convert("run/checkpoints/step_3", "model");
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_TRUE(has(damaged.err, {"got damaged ones", "model-00001-of-00002.safetensors"}));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "model/config.json"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "model/model.safetensors"));
  EXPECT_TRUE(
      has(convert("nowhere", "model").err, {"step_N or config.json, got no folder", "nowhere"}));
  EXPECT_TRUE(has(convert("run", "model").err, {"got that of a run: give ", "run/checkpoints ("}));
  EXPECT_TRUE(has(convert("", "").err, {"[convert]"}));
}

}  // namespace
}  // namespace tessera
