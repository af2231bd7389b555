// Every path option of every program that takes some, from a person's home: ~/x, which a shell
// leaves as it is in --out=~/x.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;

class HomePrograms : public testing::TinyTraining {
 protected:
  HomePrograms() {
    flags_["data.path"] = "~/text.txt";
    flags_["out"] = "~/run";
    flags_["parallel.ranks"] = "1";
  }
  ~HomePrograms() override { EXPECT_FALSE(fs::exists("~")) << "a folder of that name"; }

  Outcome at_home(const std::string& program, const Flags& flags) const {
    Outcome outcome = run_program(program, flags, {{"HOME", folder_.path()}});
    EXPECT_EQ(outcome.exit_code, 0) << program << ": " << outcome.err;
    return outcome;
  }
  void expect_there(std::initializer_list<const char*> names) const {
    for (const char* name : names) EXPECT_TRUE(fs::exists(folder_ / name)) << name;
  }
};

TEST_F(HomePrograms, OfATraining) {
  at_home(testing::kTransformer, with({{"log.jsonl", "~/log.jsonl"},
                                       {"log.trace", "~/trace.json"},
                                       {"log.probe", "~/probe.jsonl"},
                                       {"log.tensorboard", "~/tb"},
                                       {"checkpoint.every", "3"},
                                       {"checkpoint.dir", "~/checkpoints"},
                                       {"save.final", "~/model"}}));
  expect_there({"run/config.toml", "log.jsonl", "trace.json", "probe.jsonl", "tb",
                "checkpoints/latest", "model/config.json"});
  at_home(testing::kTransformer,
          with({{"resume", "~/checkpoints"}, {"train.steps", "4"}, {"out", "~/more"}}));
  expect_there({"more/log.jsonl"});
  at_home(testing::kTransformer, with({{"init.from", "~/model"}, {"out", "~/from"}}));
  expect_there({"from/log.jsonl"});
}

TEST_F(HomePrograms, OfAConfigFile) {
  folder_.write("a.toml", "out = \"~/by_file\"\n[log]\njsonl = \"~/by_file.jsonl\"\n");
  flags_.erase("out");
  at_home(testing::kTransformer, with({{"config", "~/a.toml"}}));
  expect_there({"by_file/config.toml", "by_file.jsonl"});
}

TEST_F(HomePrograms, OfWhatLooksAndConverts) {
  Flags planned = with({{"log.trace", "~/plan.json"}});
  at_home("tools/programs/plan", planned);
  expect_there({"plan.json"});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  at_home(testing::kTransformer, with({{"checkpoint.every", "3"}}));
  at_home("tools/convert/convert", {{"from", "~/run/checkpoints"}, {"to", "~/model"}});
  expect_there({"model/model.safetensors"});
}

TEST_F(HomePrograms, OfTheDoctor) {
  const Outcome outcome =
      run_program("tools/doctor/doctor",
                  Flags{{"out", "~/run"}, {"data.path", "~/text.txt"}, {"self_test", "false"}},
                  {{"HOME", folder_.path()}});
  EXPECT_TRUE(has(outcome.out, {folder_ / "run", folder_ / "text.txt: text, "})) << outcome.err;
}

TEST_F(HomePrograms, TheHomeOfAnotherIsRefused) {
  flags_["data.path"] = folder_ / "text.txt";
  const auto refused = [](const std::string& program, const Flags& flags) {
    const Outcome outcome = run_program(program, flags);
    EXPECT_EQ(outcome.exit_code, 1) << program;
    EXPECT_TRUE(has(outcome.err, {"[path] expected ~ or ~/", "~nobody/x"})) << program;
  };
  for (const char* option : {"out", "data.path", "log.jsonl", "log.trace", "log.probe",
                             "log.tensorboard", "save.final", "init.from", "config", "resume"}) {
    Flags flags = with({{"out", folder_ / "run"}});
    if (std::string(option) == "init.from") flags = {{"out", folder_ / "run"}};
    flags[option] = "~nobody/x";
    refused(testing::kTransformer, flags);
  }
  refused(testing::kMlp, {{"data.path", "~nobody/x"}});
  refused("tools/programs/plan", {{"log.trace", "~nobody/x"}});
  refused("tools/convert/convert", {{"from", "~nobody/x"}, {"to", folder_ / "model"}});
  refused("tools/convert/convert", {{"from", folder_ / "a"}, {"to", "~nobody/x"}});
  EXPECT_FALSE(fs::exists("~nobody"));
}

}  // namespace
}  // namespace tessera
