// Saves that are killed, or whose disk fails: the folder is then one model, the older or the new.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <future>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tools/huggingface/gpt2_files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::below;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;
using testing::with_fault;

/// Two models that differ in the number of heads, which no tensor shows, and in their values.
class SaveFaults : public ::testing::Test {
 protected:
  SaveFaults() {
    folder_.write("text.txt", std::string(400, 'a'));
    EXPECT_EQ(save(old_, "old").exit_code, 0);
    EXPECT_EQ(save(new_, "new").exit_code, 0);
    EXPECT_NE(read("old/model.safetensors"), read("new/model.safetensors"));
    start_with_old();
    weights_before_ = read("m/model.safetensors");
  }

  static void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }
  /// Waits until there is a file; false after a minute.
  static bool appears(const std::string& path) {
    for (int i = 0; i < 6000 && !fs::exists(path); ++i) pause();
    return fs::exists(path);
  }
  std::string read(const std::string& name) const { return folder_.read(name); }
  bool exists(const std::string& name) const { return fs::exists(folder_ / name); }
  void start_with_old() const {
    fs::remove_all(folder_ / "m");
    fs::copy(folder_ / "old", folder_ / "m");
  }
  Flags flags(const Flags& more) const {
    Flags flags = {{"data.path", folder_ / "text.txt"},
                   {"data.format", "bytes"},  // though a folder has what is called a tokenizer
                   {"out", folder_ / "run"},
                   {"model.seq", "8"},
                   {"train.steps", "0"},
                   {"train.batch", "1"},
                   {"parallel.ranks", "1"},
                   {"data.val_fraction", "0"},
                   {"log.every", "0"},
                   {"log.peak_ms", "0"},
                   {"sample.tokens", "0"},
                   {"device", "cpu"}};
    for (const auto& [name, value] : more) flags[name] = value;
    return flags;
  }
  Outcome save(Flags model, const std::string& name, const Flags& environment = {}) const {
    model["save.final"] = folder_ / name;
    return run_program("tools/programs/train_transformer", flags(model), environment);
  }
  /// "old" or "new" as m/ loads, or the error.
  std::string loaded() const {
    const Outcome outcome =
        run_program("tools/programs/train_transformer", flags({{"init.from", folder_ / "m"}}));
    if (outcome.exit_code != 0) return outcome.err;
    for (const std::string name : {"old", "new"}) {
      const bool heads = has(outcome.out, {name == "old" ? ", 2 heads," : ", 8 heads,"});
      if (heads && read("run/log.jsonl").find(sha256(name)) != std::string::npos) return name;
    }
    return "a mix";
  }
  const std::string& sha256(const std::string& name) const {
    std::string& hash = name == "old" ? old_sha256_ : new_sha256_;
    if (!hash.empty()) return hash;
    const Flags from = flags({{"init.from", folder_ / name}, {"out", folder_ / "other"}});
    EXPECT_EQ(run_program("tools/programs/train_transformer", from).exit_code, 0);
    std::istringstream log(read("other/log.jsonl"));
    json last;
    for (std::string line; std::getline(log, line);) last = testing::parse_json(line);
    return hash = last.at("final").at("params_sha256");
  }
  /// What a program that knows nothing of our care would take for a model is one.
  void expect_pair_or_no_config() const {
    if (!exists("m/config.json") || !exists("m/model.safetensors")) return;
    EXPECT_EQ(read("m/config.json") == read("old/config.json"),
              read("m/model.safetensors") == weights_before_);
  }
  void expect_clean() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_ / "m")) {
      names.push_back(entry.path().filename().string());
    }
    std::ranges::sort(names);
    EXPECT_EQ(names, (std::vector<std::string>{"config.json", "model.safetensors"}));
  }

  const TempFolder folder_;
  const Flags old_ = {
      {"model.layers", "1"}, {"model.heads", "2"}, {"model.dim", "8"}, {"train.seed", "1"}};
  const Flags new_ = {
      {"model.layers", "1"}, {"model.heads", "8"}, {"model.dim", "8"}, {"train.seed", "2"}};
  std::string weights_before_;  // of m/
  mutable std::string old_sha256_, new_sha256_;
};

TEST_F(SaveFaults, KilledAtAnyInstantLeavesOneModel) {
  int num_old = 0, num_new = 0, num_without_config = 0;
  for (int at = 1;; ++at) {
    start_with_old();
    const Outcome killed =
        save(new_, "m", with_fault({"rename,unlink,fsync,close", below(folder_, "m"), at, "kill"}));
    if (killed.exit_code == 0) break;
    ASSERT_EQ(killed.exit_code, -1) << killed.err;
    ASSERT_LT(at, 100);
    const std::string model = loaded();
    EXPECT_TRUE(model == "old" || model == "new") << at << ": " << model;
    (model == "old" ? num_old : num_new) += 1;
    num_without_config += exists("m/config.json") ? 0 : 1;
    expect_pair_or_no_config();
    if (at % 3 != 0) continue;  // a sample: it takes its time
    // The next save finds nothing in its way, and leaves nothing.
    ASSERT_EQ(save(new_, "m").exit_code, 0) << at;
    EXPECT_EQ(loaded(), "new") << at;
    expect_clean();
  }
  EXPECT_GT(num_old, 5);
  EXPECT_GT(num_new, 2);
  EXPECT_GT(num_without_config, 2);
}

TEST_F(SaveFaults, KilledOverWeightsOfOthersSaysHowToGoBack) {
  // As the library of others writes them: no config in the metadata.
  const auto with_weights_of_others = [&] {
    start_with_old();
    std::vector<engine::TensorSpec> specs;
    const engine::SafetensorsFile ours(folder_ / "old/model.safetensors");
    for (const auto& tensor : ours.tensors()) specs.push_back({tensor.name, tensor.shape});
    engine::SafetensorsWriter writer(folder_ / "m/model.safetensors", specs);
    for (const auto& tensor : ours.tensors()) {
      std::vector<float> values(static_cast<std::size_t>(engine::numel(tensor.shape)));
      ours.read(tensor, 0, values);
      writer.write(tensor.name, values);
    }
    writer.finish();
    weights_before_ = read("m/model.safetensors");
  };
  with_weights_of_others();
  EXPECT_EQ(loaded(), "old");
  int num_refused = 0;
  for (int at = 1;; ++at) {
    with_weights_of_others();
    const Outcome killed =
        save(new_, "m", with_fault({"rename,unlink", below(folder_, "m/"), at, "kill"}));
    if (killed.exit_code == 0) break;
    ASSERT_EQ(killed.exit_code, -1) << killed.err;
    expect_pair_or_no_config();
    std::string model = loaded();
    if (model != "old" && model != "new") {
      ++num_refused;
      EXPECT_TRUE(
          has(model, {"[model] expected ", "m/config.json", "cut short", "config.json.replaced"}));
      fs::rename(folder_ / "m/config.json.replaced", folder_ / "m/config.json");
      EXPECT_EQ(loaded(), "old") << at;
    }
  }
  EXPECT_EQ(num_refused, 1);
}

TEST_F(SaveFaults, OverAModelOfTheSameConfigNothingIsEverMissing) {
  Flags again = old_;
  again["train.seed"] = "3";
  for (int at = 1;; ++at) {
    start_with_old();
    const Outcome killed =
        save(again, "m", with_fault({"rename,unlink", below(folder_, "m/"), at, "kill"}));
    ASSERT_TRUE(exists("m/config.json")) << at;
    EXPECT_EQ(read("m/config.json"), read("old/config.json"));
    if (killed.exit_code == 0) break;
  }
  expect_clean();
  EXPECT_NE(read("m/model.safetensors"), read("old/model.safetensors"));
}

// Over shards of other names and of these, and over one file.
TEST_F(SaveFaults, KilledAtAnyInstantShardsAreOfOneModelOrRefused) {
  Flags in_shards = old_, newer = new_;
  in_shards["save.shard_gib"] = newer["save.shard_gib"] = "2.5e-6";
  ASSERT_EQ(save(in_shards, "old_shards").exit_code, 0);
  ASSERT_TRUE(exists("old_shards/model-00002-of-00003.safetensors"));
  for (const std::string before : {"old_shards", "old"}) {
    int num_old = 0, num_new = 0, num_refused = 0;
    for (int at = 1;; ++at) {
      fs::remove_all(folder_ / "m");
      fs::copy(folder_ / before, folder_ / "m");
      const Outcome killed =
          save(newer, "m", with_fault({"rename,unlink", below(folder_, "m/"), at, "kill"}));
      if (killed.exit_code == 0) break;
      ASSERT_EQ(killed.exit_code, -1) << killed.err;
      const std::string model = loaded();
      (model == "old" ? num_old : model == "new" ? num_new : num_refused) += 1;
      if (model == "old" || model == "new") continue;
      EXPECT_TRUE(has(model, {"shards need model.safetensors.index.json"})) << at << ": " << model;
      ASSERT_EQ(save(newer, "m").exit_code, 0) << at;
      EXPECT_EQ(loaded(), "new") << at;
    }
    EXPECT_GE(num_old, 2) << before;
    EXPECT_GE(num_new, 2) << before;
    EXPECT_EQ(num_refused, before == "old" ? 0 : 4) << before;
    EXPECT_TRUE(exists("m/model-00003-of-00003.safetensors"));
    EXPECT_FALSE(exists("m/model.safetensors"));
  }
}

// A tokenizer that is kept is that of the model, or the folder says that a save was cut short.
TEST_F(SaveFaults, KilledAtAnyInstantATokenizerIsThatOfTheModel) {
  fs::copy(folder_ / "new", folder_ / "base");
  folder_.write("base/tokenizer.json", "new");
  int num_old = 0, num_new = 0, num_cut_short = 0;
  for (int at = 1;; ++at) {
    start_with_old();
    folder_.write("m/tokenizer.json", "old");
    const Outcome killed = save({{"init.from", folder_ / "base"}}, "m",
                                with_fault({"rename,unlink", below(folder_, "m/"), at, "kill"}));
    if (killed.exit_code == 0) break;
    ASSERT_EQ(killed.exit_code, -1) << killed.err;
    if (exists("m/config.json.replaced")) {
      ++num_cut_short;
      const Outcome refused = save({{"init.from", folder_ / "m"}}, "other");
      EXPECT_TRUE(has(refused.err, {"a save was cut short", "config.json.replaced"})) << at;
      continue;
    }
    const std::string model = loaded();
    EXPECT_EQ(read("m/tokenizer.json"), model) << at;
    (model == "old" ? num_old : num_new) += 1;
  }
  EXPECT_GE(num_old, 1);
  EXPECT_GE(num_cut_short, 3);
  EXPECT_EQ(loaded(), "new");
  EXPECT_EQ(read("m/tokenizer.json"), "new");
  EXPECT_FALSE(exists("m/config.json.replaced"));
  EXPECT_EQ(num_new, 0) << "the last thing that is done is to remove the older config";
}

TEST_F(SaveFaults, AConfigOfAnotherModelIsRefused) {
  fs::remove(folder_ / "m/config.json");
  fs::copy(folder_ / "new/config.json", folder_ / "m/config.json");
  EXPECT_TRUE(has(loaded(), {"n_head of 2", "got 8", "config.json", folder_ / "m"}));
  json config = testing::parse_json(read("old/config.json"));
  config["layer_norm_epsilon"] = 1e-3;
  folder_.write("m/config.json", testing::json_text(config));
  EXPECT_TRUE(has(loaded(), {"layer_norm_epsilon of 1e-05", "got 0.001"}));
  config["layer_norm_epsilon"] = 1e-5;
  config["resid_pdrop"] = 0.5;
  folder_.write("m/config.json", testing::json_text(config));
  EXPECT_EQ(loaded(), "old");
}

TEST_F(SaveFaults, AFailingDiskIsNamedAndLeavesOneModel) {
  struct Case {
    std::string calls, part, reason;
    int error;
    bool is_old;  // else the weights may be in place, as what failed came later
  };
  for (const Case& c : std::vector<Case>{
           {"write", "m/", "No space left on device", ENOSPC, true},
           {"fsync", "m/", "Input/output error", EIO, true},
           {"close", "m/", "Disk quota exceeded", EDQUOT, true},
           {"rename", "m/", "Input/output error", EIO, false},
           {"fsync", "m", "Input/output error", EIO, false},
       }) {
    int num_failed = 0;
    for (int at = 1;; ++at) {
      start_with_old();
      const Outcome outcome = save(
          new_, "m", with_fault({c.calls, below(folder_, c.part), at, std::to_string(c.error)}));
      const std::string which = c.calls + " " + c.part + " " + std::to_string(at);
      if (outcome.exit_code == 0) {
        // Some closings have nothing to lose: those of files that are read or removed.
        if (c.calls == "close" && at < 40) continue;
        EXPECT_EQ(loaded(), "new");
        break;
      }
      ++num_failed;
      EXPECT_EQ(outcome.exit_code, 1) << which;
      EXPECT_TRUE(has(outcome.err, {"error: ", "[", folder_ / "m/", c.reason})) << which;
      const std::string model = loaded();
      EXPECT_TRUE(model == "old" || (!c.is_old && model == "new")) << which << ": " << model;
      // Weights whose config could not follow say it themselves.
      if (exists("m/config.json")) {
        expect_clean();
      } else {
        EXPECT_TRUE(c.calls == "rename" && model == "new") << which;
      }
    }
    EXPECT_GE(num_failed, 2) << c.calls;
  }
}

// What a power cut leaves is what had been flushed: no step may come to the disk before the last.
TEST_F(SaveFaults, EveryStepIsFlushedBeforeTheNext) {
  const auto steps_of_saving = [&](const Flags& model) {
    const std::string list = folder_ / "steps";
    fs::remove(list);
    const auto traced = with_fault({"rename,unlink,fsync", below(folder_, "m"), 0, list});
    EXPECT_EQ(save(model, "m", traced).exit_code, 0);
    // Without the numbers of temporary files, and what was tried before training.
    const std::string steps = std::regex_replace(read("steps"), std::regex("-[0-9]+-[0-9]+"), "");
    const std::string tried = "unlink model.safetensors.tmp\n";
    EXPECT_NE(steps.find(tried), std::string::npos) << steps;
    return steps.substr(steps.find(tried) + tried.size());
  };
  EXPECT_EQ(steps_of_saving(new_),
            "fsync model.safetensors.tmp\n"
            "fsync config.json.tmp\n"
            "rename config.json\n"
            "fsync m\n"
            "rename model.safetensors.tmp\n"
            "fsync m\n"
            "rename config.json.tmp\n"
            "unlink config.json.replaced\n"
            "fsync m\n");
  EXPECT_EQ(steps_of_saving(new_),
            "fsync model.safetensors.tmp\n"
            "rename model.safetensors.tmp\n"
            "unlink config.json.replaced\n"
            "fsync m\n"
            "unlink config.json.tmp\n");
  // So are the names of new folders.
  const auto traced = with_fault({"fsync", below(folder_, "a"), 0, folder_ / "new folders"});
  EXPECT_EQ(save(new_, "a/b/m", traced).exit_code, 0);
  EXPECT_TRUE(read("new folders").starts_with("fsync b\nfsync a\nfsync m\n"));
}

TEST_F(SaveFaults, SaversIntoOneFolderTakeTurns) {
  const std::string first_waits = folder_ / "first", second_waits = folder_ / "second";
  const auto saving = [&](Flags model, const std::string& out, const std::string& paused) {
    model["out"] = folder_ / out;
    return std::async(std::launch::async, [this, model, paused] {
      return save(model, "m", with_fault({"rename", below(folder_, "m/"), 1, paused}));
    });
  };
  // As the model that the first one replaces, and as neither.
  for (const std::string heads : {"2", "4"}) {
    start_with_old();
    auto first = saving(new_, "run1", first_waits);
    EXPECT_TRUE(appears(first_waits));
    Flags other = new_;
    other["model.heads"] = heads;
    auto second = saving(other, "run2", second_waits);
    for (int i = 0; i < 50 && !fs::exists(second_waits); ++i) pause();
    EXPECT_FALSE(fs::exists(second_waits)) << "between the first one's files";
    fs::remove(first_waits);
    EXPECT_EQ(first.get().exit_code, 0);
    ASSERT_TRUE(appears(second_waits)) << second.get().err;
    EXPECT_EQ(loaded(), "new");
    fs::remove(second_waits);
    const Outcome outcome = second.get();
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    expect_clean();
    EXPECT_TRUE(has(read("m/config.json"), {"\"n_head\": " + heads + ","}));
  }
}

TEST_F(SaveFaults, WhatCannotBeReplacedIsFoundBeforeTraining) {
  for (const std::string name : {"model.safetensors", "config.json"}) {
    fs::remove_all(folder_ / "run");
    const Outcome outcome = save(
        new_, "m", with_fault({"rmdir", below(folder_, "m/" + name), 1, std::to_string(EPERM)}));
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"can be replaced", "Operation not permitted", "/m/" + name}));
    EXPECT_FALSE(exists("run")) << "found after the start";
    EXPECT_EQ(loaded(), "old");
    expect_clean();
  }
}

}  // namespace
}  // namespace tessera
