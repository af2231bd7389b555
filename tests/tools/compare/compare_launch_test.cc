// compare --launch: trainings of several processes, compared with those of threads.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/launched_comparison.h"
#include "tests/tools/compare/tiny_comparison.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::arguments_of;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;

const std::string kCompare = "tools/compare/compare";
constexpr const char* kTwo = "torchrun: 1 host x 2 processes x 1 thread, transport gloo";

class CompareLaunch : public ::testing::Test {
 protected:
  CompareLaunch() : flags_(testing::tiny_comparison(folder_)) {
    flags_["launch"] = testing::launcher_script(folder_) + " 2";
    flags_.erase("parallel.ranks");
    flags_.erase("sweep");
  }
  Flags with(const Flags& more) const {
    Flags flags = more;
    flags.insert(flags_.begin(), flags_.end());
    return flags;
  }
  Outcome compare(const Flags& more = {}) const { return run_program(kCompare, with(more)); }
  Outcome find(const std::string& a, const std::string& b, const Flags& more = {}) const {
    Flags flags = with(more);
    for (const char* name : {"strategies", "warmup_steps"}) flags.erase(name);
    std::vector<std::string> arguments = arguments_of(flags);
    arguments.insert(arguments.end(), {"--find-divergence", a, b});
    return run_program(kCompare, arguments);
  }
  json configurations() const {
    return testing::parse_json(folder_.read("out/compare.json")).at("configurations");
  }
  std::string read(const json& configuration, const std::string& name) const {
    return folder_.read("out/" + configuration.at("folder").get<std::string>() + "/" + name);
  }
  /// What the log of a training says at its end.
  json final_record(const json& configuration) const {
    const std::string log = read(configuration, "round-1/log.jsonl");
    return testing::parse_json(log.substr(log.rfind('\n', log.size() - 2) + 1)).at("final");
  }
  /// Of all processes that the launcher has started, those that go on.
  std::vector<int> survivors() const {
    std::vector<int> alive;
    std::istringstream pids(folder_.read("pids"));
    for (int pid = 0; pids >> pid;) {
      if (::kill(pid, 0) == 0) alive.push_back(pid);
    }
    return alive;
  }

  const testing::TempFolder folder_;
  Flags flags_;
};

TEST_F(CompareLaunch, ProcessesHaveTheBitsOfThreads) {
  const Flags both = {{"sweep", "parallel.launcher=auto,threads"}, {"parallel.ranks", "2"}};
  const Outcome outcome = compare(both);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  const json all = configurations();
  ASSERT_EQ(all.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    const bool is_launched = i % 2 == 0;
    EXPECT_EQ(all[i].at("state"), "done");
    EXPECT_EQ(all[i].at("launch"), is_launched ? json(kTwo) : json(nullptr));
    EXPECT_EQ(all[i].at("params_sha256"), json({final_record(all[i]).at("params_sha256")}));
    EXPECT_EQ(final_record(all[i]).at("params_sha256"), final_record(all[0]).at("params_sha256"));
    EXPECT_EQ(final_record(all[i]).at("backend"), is_launched ? "gloo" : "threads");
    EXPECT_EQ(final_record(all[i]).value("launch", ""), is_launched ? kTwo : "");
    EXPECT_EQ(read(all[i], "configuration.toml").starts_with("# Launched: "), is_launched);
  }
  EXPECT_TRUE(has(outcome.out, {"equal bits"})) << outcome.out;
  const json result = testing::parse_json(folder_.read("out/compare.json"));
  EXPECT_TRUE(has(result.at("made_by").at("command").get<std::string>(), {"--launch="}));
  EXPECT_TRUE(has(testing::json_text(result.at("devices")), {kTwo}));
  EXPECT_TRUE(has(folder_.read("out/report.html"), {kTwo}));
  // Going on with another launcher would mix figures.
  Flags again = both;
  again["resume"] = "true";
  EXPECT_TRUE(has(compare(again).out, {": kept\n"}));
  again["launch"] = testing::launcher_script(folder_, "other") + " 2";
  EXPECT_TRUE(has(compare(again).err, {"[resume] expected the options of the comparison that is "
                                       "there, got # Launched: ",
                                       "/other 2 PROGRAM", "where it has # Launched: "}));
}

// All of them say the same, and something else than threads.
TEST_F(CompareLaunch, ProcessesThatComputeSomethingElseAreTold) {
  const std::string path = folder_.write(
      "trainer", "#!/bin/bash\ntest -n \"$RANK\" && more=--train.lr=0.5\nexec " +
                     fs::absolute("tools/programs/train_transformer").string() + " \"$@\" $more\n");
  fs::permissions(path, fs::perms::owner_all);
  const Outcome outcome = compare({{"trainer", path},
                                   {"strategies", "zero3"},
                                   {"sweep", "parallel.launcher=threads,auto"},
                                   {"parallel.ranks", "2"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"[parity] expected every configuration to give the numbers that it "
                                "should, got one that does not"}))
      << outcome.out << outcome.err;
}

TEST_F(CompareLaunch, RanksAreThoseThatTheLauncherStarts) {
  const Outcome outcome = compare({{"sweep", "parallel.threads=1,2"}, {"strategies", "zero3"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  const json all = configurations();
  EXPECT_EQ(all.at(0).at("ranks"), 2);
  EXPECT_EQ(all.at(1).at("ranks"), 4);
  EXPECT_EQ(final_record(all.at(1)).at("ranks"), 4);
  EXPECT_TRUE(has(all.at(1).at("launch").get<std::string>(), {"2 processes x 2 threads"}));
  flags_.erase("warmup_steps");
  const Outcome plans =
      compare({{"plan", "true"}, {"strategies", "zero3"}, {"sweep", "parallel.threads=1,3"}});
  EXPECT_EQ(plans.exit_code, 0) << plans.err;
  EXPECT_TRUE(has(plans.out, {"6 ranks in 2 processes"})) << plans.out;
}

TEST_F(CompareLaunch, FindsWhereProcessesAndThreadsPart) {
  const Outcome same = find("parallel.launcher=threads parallel.ranks=2", "zero3");
  EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
  EXPECT_TRUE(has(same.out, {"Nothing differs: ", " checksums of steps 1 to 4 are equal."}));
  EXPECT_TRUE(fs::exists(folder_ / "out/divergence/b/probe.rank1.jsonl"));
  const Outcome other = find("parallel.launcher=threads parallel.ranks=2", "comm.hook=bf16");
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_TRUE(has(other.out, {"First difference: step 1", "gradient after reduction",
                              " elements differ, the first at "}))
      << other.out << other.err;
}

TEST_F(CompareLaunch, ASignalEndsAllProcesses) {
  const std::pair<int, const char*> ways[] = {
      {SIGTERM, "kill $pids"}, {SIGTERM, "exit 1"}, {SIGINT, "kill $pids"}};
  for (std::size_t i = 0; i < std::size(ways); ++i) {
    const auto [signal, at_signal] = ways[i];
    folder_.write("pids", "");
    flags_["launch"] = testing::launcher_script(folder_, "launch", at_signal) + " 2";
    flags_["out"] = folder_ / std::to_string(i);
    flags_["strategies"] = "zero3";
    testing::Program program(kCompare, arguments_of(with({{"train.steps", "1000000"}})));
    const std::string log = flags_["out"] + "/runs/zero3/round-1/log.jsonl";
    std::error_code ignored;
    for (int n = 0; n < 3000 && (!fs::exists(log) || fs::file_size(log, ignored) == 0); ++n) {
      ASSERT_FALSE(program.has_ended()) << program.wait().err;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(survivors().size(), 2u);
    program.send(signal);
    const Outcome outcome = program.wait();
    EXPECT_EQ(survivors(), std::vector<int>());
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.out, {"zero3: interrupted\n"})) << outcome.out << outcome.err;
  }
}

TEST_F(CompareLaunch, ATrainingThatALauncherLosesFails) {
  // It has no word for its processes' ends.
  const std::string path = folder_.write(
      "deaf", "#!/bin/bash\n" + testing::launcher_script(folder_) + " \"$@\"\nexit 0\n");
  fs::permissions(path, fs::perms::owner_all);
  flags_["strategies"] = "zero3";
  const Outcome outcome = compare({{"launch", path + " 2"}, {"train.lr", "1e30"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(configurations().at(0).at("state"), "failed");
  const std::string failed = testing::launcher_script(folder_) + " 2";
  const Outcome told = compare({{"launch", failed}, {"train.lr", "1e30"}, {"out", folder_ / "b"}});
  EXPECT_TRUE(has(told.out, {"zero3: failed, exit code 1; see "})) << told.out;
}

// As of a launcher that gives them other processes the next time.
TEST_F(CompareLaunch, ATrainingByOtherProcessesThanExpectedFails) {
  const std::string path = folder_.write("other", "#!/bin/bash\ncase $2 in\n  */compare) exec " +
                                                      testing::launcher_script(folder_) +
                                                      " \"$@\" ;;\nesac\nshift\nexec \"$@\"\n");
  fs::permissions(path, fs::perms::owner_all);
  const Outcome outcome = compare({{"launch", path + " 2"}, {"strategies", "zero3"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(
      has(outcome.out, {"zero3: failed, [compare] expected a training by torchrun: 1 host x "
                        "2 processes x 1 thread, transport gloo, got one by one process"}))
      << outcome.out;
}

TEST_F(CompareLaunch, WhatCannotBeIsAnErrorBeforeAnythingIsTrained) {
  const auto refused = [&](const Flags& more, const std::vector<std::string>& words) {
    const Outcome outcome = compare(more);
    EXPECT_EQ(outcome.exit_code, 1) << words[0];
    for (const std::string& part : words) EXPECT_TRUE(has(outcome.err, {part})) << outcome.err;
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  };
  const std::string script = testing::launcher_script(folder_);
  refused({{"launch", "no-such-launcher -n 4"}},
          {"[launch] expected a command that is in PATH, got no-such-launcher"});
  refused({{"launch", folder_ / "nothing"}},
          {"[launch] expected a program that can be run", folder_ / "nothing"});
  refused({{"launch", "mpirun -n '4"}}, {"[launch] expected the other ' of a word"});
  refused({{"launch", " "}}, {"[launch] expected a command such as 'mpirun -n 4'"});
  refused({{"launch", "false"}}, {"to start a program that ends well, got exit code 1"});
  refused({{"launch", "sh -c 'echo no slots; exit 3'"}},
          {"got exit code 3; it said:\n  no slots\n"});
  for (const char* launch : {"true", "env"}) {
    refused({{"launch", launch}}, {"to start processes of which one is the first", "got 0 of"});
  }
  // Two jobs, each with a first process.
  const std::string alone = "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ";
  refused({{"launch", "sh -c '" + alone + "\"$0\" \"$@\"; " + alone + "\"$0\" \"$@\"'"}},
          {"to start processes of which one is the first", "got 2 of"});
  refused({{"parallel.ranks", "4"}},
          {"expected parallel.ranks=2, as there are 2 processes with parallel.threads=1, got 4",
           "configuration ddp"});
  refused({{"sweep", "parallel.ranks=2,4"}}, {"got 4", "configuration ddp ranks=4"});
  refused({{"parallel.launcher", "slurm"}}, {"expected parallel.launcher=auto, or threads"});
  refused({{"parallel.launcher", "threads"}}, {"expected a training that is several processes"});
  refused({{"parallel.transport", "mpi"}}, {"expected a launcher of MPI, got torchrun"});
}

TEST_F(CompareLaunch, OneThatALauncherHasStartedNamesTheOption) {
  const std::map<std::string, std::string> second = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  Flags without = flags_;
  without.erase("launch");
  for (const Flags& flags : {flags_, without}) {
    const Outcome outcome = run_program(kCompare, flags, second);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"[compare] expected to be started once, got env, process 1 of 2",
                                  "--launch='mpirun -n 4'"}));
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  }
}

}  // namespace
}  // namespace tessera::tools
