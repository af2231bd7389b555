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

const std::string kCompare = "tools/compare/compare";

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
  const Outcome from = run_program("tools/doctor/doctor", Flags{{"init.from", "~/model"}},
                                   {{"HOME", folder_.path()}});
  EXPECT_TRUE(has(from.err, {folder_ / "model/config.json"})) << from.err;
  const Outcome flight = run_program("tools/doctor/doctor", Flags{{"flight", "~/flight.json"}},
                                     {{"HOME", folder_.path()}});
  EXPECT_TRUE(has(flight.err, {"[file] ", folder_ / "flight.json"}));
}

// Of several processes, whose first looks at the folder before it waits for the others.
TEST_F(HomePrograms, OfAMeetingPlace) {
  const auto error_at = [&](const std::string& path) {
    const Outcome outcome =
        run_program(testing::kTransformer, with({{"parallel.address", "file:" + path}}),
                    {{"HOME", folder_.path()},
                     {"RANK", "0"},
                     {"WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", "29500"}});
    EXPECT_EQ(outcome.exit_code, 1);
    return outcome.err;
  };
  flags_.erase("parallel.ranks");
  EXPECT_TRUE(has(error_at("~/none/meet"),
                  {"[control] expected a folder for " + folder_ / "none/meet" + ", got No such"}));
  EXPECT_TRUE(has(error_at("~nobody/x"), {"[path] expected ~ or ~/", "~nobody/x"}));
}

TEST_F(HomePrograms, OfAComparison) {
  Flags compared =
      with({{"strategies", "ddp,zero3"}, {"warmup_steps", "1"}, {"out", "~/compared"}});
  compared.erase("log.every");
  compared.erase("sample.tokens");
  at_home(kCompare, [&] {
    Flags flags = compared;
    flags["report"] = "~/page.html";
    return flags;
  }());
  expect_there({"compared/compare.json", "page.html"});
  const auto error_with = [&](std::vector<std::string> words) {
    for (const std::string& word : testing::arguments_of(compared)) words.push_back(word);
    return run_program(kCompare, words, {{"HOME", folder_.path()}}).err;
  };
  compared["out"] = "~/others";
  EXPECT_TRUE(has(error_with({"--trainer=~/none"}), {"[trainer] ", folder_ / "none"}));
  EXPECT_TRUE(has(error_with({"--launch=~/none 2"}), {"[launch] ", folder_ / "none"}));
  EXPECT_TRUE(
      has(run_program(kCompare, std::vector<std::string>{"--find-divergence", "~/a.jsonl", "~/b"},
                      {{"HOME", folder_.path()}})
              .err,
          {"[file] ", folder_ / "a.jsonl"}));
}

TEST_F(HomePrograms, OfTheBenchmark) {
  const auto same = [&](Flags flags) {
    flags["bench.jsonl"] = "~/same";
    return run_program("tools/bench/bench", flags, {{"HOME", folder_.path()}}).err;
  };
  const std::string both = "(" + folder_ / "same" + ", " + folder_ / "same" + ")";
  EXPECT_TRUE(has(same({{"bench.python", "python3"}, {"bench.peer", "~/same"}}),
                  {"bench.jsonl and bench.peer to name different files", both}));
  EXPECT_TRUE(has(same({{"bench.python", "~/same"}}),
                  {"bench.jsonl and bench.python to name different files", both}));
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
