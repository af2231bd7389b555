// Checkpoints to models of Hugging Face, and back.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/reader.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/train/tiny_training.h"
#include "tools/convert/newest_checkpoint.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::has;
using testing::Outcome;

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
  const auto sha = [](const std::string& out) { return out.substr(out.find("sha256 "), 71); };
  EXPECT_EQ(sha(resumed.out), sha(started.out));
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

TEST_F(Convert, WhatCannotBeConvertedIsRefusedAndNothingIsLost) {
  ASSERT_EQ(run({{"checkpoint.every", "3"}}).exit_code, 0);
  const std::string name = "run/checkpoints/step_3/model-00001-of-00002.safetensors";
  std::string bytes = folder_.read(name);
  bytes[bytes.size() - 5] ^= 4;
  folder_.write(name, bytes);
  const Outcome damaged = convert("run/checkpoints/step_3", "model");
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_TRUE(has(damaged.err, {"got damaged ones", "model-00001-of-00002.safetensors"}));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "model/config.json"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "model/model.safetensors"));
  EXPECT_TRUE(has(convert("nowhere", "model").err, {"manifest.json, step_N or config.json"}));
  EXPECT_TRUE(has(convert("", "").err, {"[convert]"}));
}

}  // namespace
}  // namespace tessera
