// Trainings whose ranks are processes, of which one is not like the others, comes late or never,
// fails, is killed or asked to end: all end, non-zero where they must, and say which one it was.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/programs/lost_process_suite.h"
#include "tests/tools/testing/process_training.h"
#include "tools/cli/main.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::below;
using testing::Fault;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::Own;
using testing::Processes;
using testing::with_fault;

const Flags kForever = {{"train.steps", "1000000000"}, {"train.schedule", "constant"}};

class ProcessFaults : public testing::ProcessTraining {
 protected:
  bool has_begun() const { return exists("run/config.toml"); }
  /// Three processes that have logged some steps.
  Processes training(const Flags& more = {}) {
    Flags flags = more;
    flags.insert(kForever.begin(), kForever.end());
    Processes processes = start(3, flags);
    wait_until(processes, [&] {
      const std::string log = folder_.read("run/log.jsonl");
      return std::ranges::count(log, '\n') > 3;
    });
    return processes;
  }
  /// All have ended with an error that has these parts; but `lost`, which was killed.
  static void expect_failed(const Processes::Outcomes& all,
                            std::initializer_list<std::string_view> parts, int lost = -1) {
    for (int p = 0; p < std::ssize(all); ++p) {
      const Outcome& outcome = all[static_cast<std::size_t>(p)];
      const int expected = p == lost ? -1 : lost >= 0 ? tools::kTryAgain : 1;
      EXPECT_EQ(outcome.exit_code, expected) << "process " << p << ": " << outcome.err;
      if (p == lost) continue;
      EXPECT_TRUE(has(outcome.err, parts)) << "process " << p;
    }
  }
};

// Not like the others
// ------------------------------------------------------------------------------------------------

TEST_F(ProcessFaults, OneThatIsNotLikeTheFirstIsNamedWithBothValues) {
  fs::create_directory(folder_ / "other");
  std::string text = folder_.read("text.txt");
  text[100] = '!';
  folder_.write("other/text.txt", text);
  folder_.write("prompts.txt", "a\n");
  folder_.write("other/prompts.txt", "b\n");
  const auto in = [&](const std::string& folder) {
    return testing::Environment{{"BUILD_WORKING_DIRECTORY", folder}};
  };
  const struct {
    Flags flags;
    std::map<int, Own> own;
    std::string says;
  } cases[] = {
      {{},
       {{1, {{{"train.seed", "7"}}}}},
       "train.seed = 1337 in every process, as rank 0 has it, got 7 (rank 1)"},
      {{},
       {{2, {{{"parallel.strategy", "ddp"}}}}},
       "parallel.strategy = \"zero3\" in every process, as rank 0 has it, got \"ddp\" (rank 2)"},
      {{},
       {{0, {{{"train.steps", "4"}}}}},
       "train.steps = 4 in every process, as rank 0 has it, got 3 (rank 1)"},
      {{},
       {{1, {{{"cpu.isa", "v2"}}}}},
       "cpu.isa = \"auto\" in every process, as rank 0 has it, got \"v2\" (rank 1)"},
      {{}, {{1, {{}, {{"TESSERA_CPU_ISA", "v2"}}}}}, "arithmetic.cpu.isa = "},
      {{{"data.path", "text.txt"}},
       {{0, {{}, in(folder_.path())}},
        {1, {{}, in(folder_ / "other")}},
        {2, {{}, in(folder_.path())}}},
       "data.digest = "},
      {{{"log.val_prompts", "prompts.txt"}, {"log.val_every", "1"}, {"sample.tokens", "2"}},
       {{0, {{}, in(folder_.path())}},
        {1, {{}, in(folder_ / "other")}},
        {2, {{}, in(folder_.path())}}},
       "log.val_prompts.prompts.txt = 2 bytes "},
  };
  for (const auto& c : cases) {
    const auto all = start(3, c.flags, c.own).wait();
    expect_failed(all, {"error: [launch] expected ", c.says, "as rank 0 has it, got "});
    EXPECT_EQ(all[1].err, all[0].err);
    EXPECT_EQ(all[2].err, all[0].err);
    EXPECT_FALSE(has_begun()) << c.says;
  }
}

TEST_F(ProcessFaults, AModelWithOtherWeightsIsNamed) {
  sha256_of(start(2, {{"save.final", folder_ / "model"}}).wait());
  fs::remove_all(folder_ / "run");
  fs::create_directory(folder_ / "other");
  fs::copy(folder_ / "model", folder_ / "other/model");
  std::string weights = folder_.read("model/model.safetensors");
  weights.back() ^= 1;
  folder_.write("other/model/model.safetensors", weights);
  const auto in = [&](const std::string& folder) {
    return Own{{}, {{"BUILD_WORKING_DIRECTORY", folder}}};
  };
  const Flags from = {{"init.from", "model"}};
  expect_failed(start(2, from, {{0, in(folder_.path())}, {1, in(folder_ / "other")}}).wait(),
                {"expected init.from.model.safetensors = ", "in every process, as rank 0 has it"});
  EXPECT_FALSE(has_begun());
  sha256_of(start(2, from, {{0, in(folder_.path())}, {1, in(folder_.path())}}).wait());
}

TEST_F(ProcessFaults, AnotherBuildIsNamedWithBothDigests) {
  const std::string other = folder_ / "train_transformer";
  fs::copy_file(testing::kTransformer, other);
  fs::permissions(other, fs::perms::owner_all);
  const std::string job = new_job();
  const auto start_both = [&] {
    Processes processes;
    processes.add(start_one(job, 0, 2, {}));
    processes.add(start_one(job, 1, 2, {}, {}, other));
    return processes.wait();
  };
  sha256_of(start_both());  // wherever it lies, it is the same
  std::ofstream(other, std::ios::app) << "of another compiler";
  fs::remove_all(folder_ / "run");
  expect_failed(start_both(), {"error: [launch] expected program.digest = ",
                               " in every process, as rank 0 has it, got ", " (rank 1)"});
  EXPECT_FALSE(has_begun());
}

TEST_F(ProcessFaults, WhatProcessesCannotDoIsRefusedBeforeTheyMeet) {
  const struct {
    Flags flags;
    testing::Environment environment;
    std::string says;
  } cases[] = {
      {{{"parallel.ranks", "3"}},
       {},
       "expected parallel.ranks=2, as there are 2 processes with "
       "parallel.threads=1, got 3 (torchrun, process "},
      {{{"parallel.transport", "nccl"}},
       {},
       "[launch] expected parallel.transport=nccl between GPUs, got it on the CPU (torchrun, "},
      {{{"parallel.backend", "threads"}},
       {},
       "expected parallel.backend=auto with several processes"},
      {{{"parallel.transport", "mpi"}}, {}, "expected a launcher of MPI, got torchrun, process "},
      {{}, {{"TORCHELASTIC_RUN_ID", ""}, {"MASTER_ADDR", ""}}, "expected MASTER_ADDR with RANK="},
      {{{"parallel.interface", "lo"}},
       {{"TORCHELASTIC_RUN_ID", ""},
        {"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
       "expected parallel.interface with gloo alone, got it with mpi"},
      {{{"parallel.launcher", "slurm"}}, {}, "expected slurm to have started this process"},
  };
  for (const auto& c : cases) {
    const Own own{.environment = c.environment};
    const auto all = start(2, c.flags, {{0, own}, {1, own}}).wait();
    expect_failed(all, {"error: ", c.says});
    EXPECT_EQ(all[0].out + all[1].out, "") << c.says;
    EXPECT_FALSE(exists("run")) << c.says;
  }
}

TEST_F(ProcessFaults, AnInterfaceThatOneHasNotEndsAllWithTheOnesThatItHas) {
  const auto all = start(2, {}, {{1, {.environment = {{"GLOO_SOCKET_IFNAME", "none0"}}}}}).wait();
  expect_failed(all, {"[gloo] expected an interface or an address of this machine, got none0; "
                      "there are ",
                      "lo (127.0.0.1)"});
  EXPECT_TRUE(has(all[0].err, {"[join] process 1: "}));
  sha256_of(start(2, {{"parallel.interface", "lo"}}).wait());
}

TEST_F(ProcessFaults, AnotherSecretDoesNotGetIn) {
  const auto all = start(2, {{"parallel.deadline_s", "5"}},
                         {{0, {.environment = {{"TESSERA_SECRET", "a"}}}},
                          {1, {.environment = {{"TESSERA_SECRET", "b"}}}}})
                       .wait();
  EXPECT_EQ(all[0].exit_code, 1);
  EXPECT_TRUE(has(all[0].err, {"missing process 1; refused process 1 ", "got another secret"}));
  EXPECT_EQ(all[1].exit_code, 1);
  EXPECT_TRUE(has(all[1].err, {"expected process 0 of job ", "got a refusal: another secret"}));
  EXPECT_FALSE(has_begun());
  sha256_of(start(2, {},
                  {{0, {.environment = {{"TESSERA_SECRET", "a"}}}},
                   {1, {.environment = {{"TESSERA_SECRET", "a"}}}}})
                .wait());
}

TEST_F(ProcessFaults, AFolderThatNotAllShareIsFoundBeforeTheFirstStep) {
  fs::create_directory(folder_ / "h1");
  fs::create_directory(folder_ / "h2");
  const auto on = [&](const char* host) {
    return Own{.environment = {{"BUILD_WORKING_DIRECTORY", folder_ / host}}};
  };
  const Flags saves = {{"checkpoint.every", "2"}, {"checkpoint.dir", "checkpoints"}};
  const auto all = start(3, saves, {{0, on("h1")}, {1, on("h1")}, {2, on("h2")}}).wait();
  expect_failed(all,
                {"[checkpoint] expected a folder that all hosts share, got one in which rank 2 "
                 "on ",
                 " does not see what rank 0 has written (checkpoint.dir, "});
  EXPECT_FALSE(has_begun());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "h1/checkpoints"), {}), 0);
  EXPECT_FALSE(exists("h2/checkpoints"));
  sha256_of(start(3, saves, {{0, on("h1")}, {1, on("h1")}, {2, on("h1")}}).wait());
  EXPECT_TRUE(exists("h1/checkpoints/step_2"));
}

// Late, or never
// ------------------------------------------------------------------------------------------------

TEST_F(ProcessFaults, OneThatStartsLateIsWaitedFor) {
  const std::string expected = sha256_of(start(3).wait());
  for (const int late : {0, 2}) {
    fs::remove_all(folder_ / "run");
    const std::string job = new_job();
    std::vector<std::unique_ptr<testing::Program>> programs(3);
    for (int p = 0; p < 3; ++p) {
      if (p != late) programs[static_cast<std::size_t>(p)] = start_one(job, p, 3, {});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    programs[static_cast<std::size_t>(late)] = start_one(job, late, 3, {});
    Processes processes;
    for (auto& program : programs) processes.add(std::move(program));
    EXPECT_EQ(sha256_of(processes.wait()), expected) << late;
  }
}

TEST_F(ProcessFaults, OneThatNeverComesIsNamed) {
  const std::string job = new_job();
  const Flags soon = {{"parallel.deadline_s", "5"}};
  Processes two;
  for (const int p : {0, 2}) two.add(start_one(job, p, 3, soon));
  const auto all = two.wait();
  expect_failed(all, {"error: [control] expected "});
  EXPECT_TRUE(has(all[0].err, {"waiting for 1 of 3 processes at tcp:127.0.0.1:", ": process 1\n",
                               "expected 3 processes", "got 2: missing process 1"}));
  EXPECT_FALSE(has_begun());
}

TEST_F(ProcessFaults, OneThatFailsBeforeTheyMeetEndsTheOthersWithItsReason) {
  const struct {
    int process;
    Flags flags;
    std::string says;
  } cases[] = {
      {0, {{"data.path", folder_ / "none.txt"}}, "none.txt"},
      {1, {{"data.path", folder_ / "none.txt"}}, "none.txt"},
      {2, {{"train.batches", "4"}}, "--train.batches"},
      {1, {{"train.batch", "many"}}, "--train.batch"},
  };
  for (const auto& c : cases) {
    const auto all = start(3, {}, {{c.process, {c.flags}}}).wait();
    expect_failed(all, {c.says});
    for (int p = 0; p < 3; ++p) {
      if (p == c.process) continue;
      EXPECT_TRUE(has(all[static_cast<std::size_t>(p)].err,
                      {fmt::format("error: [control] expected 3 processes to join, got an error of "
                                   "process {} (",
                                   c.process)}));
    }
    EXPECT_FALSE(has_begun());
    EXPECT_FALSE(exists("run/flight.json")) << "nobody has called anything";
  }
}

TEST_F(ProcessFaults, ASignalEndsOneThatWaitsForOthersToJoin) {
  Processes one;
  one.add(start_one(new_job(), 0, 2, {}));
  wait_until(one, [&] { return exists("run/.lock"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  one[0].send(SIGTERM);
  EXPECT_EQ(one.wait()[0].exit_code, -1);
}

// Failures
// ------------------------------------------------------------------------------------------------

TEST_F(ProcessFaults, WhoeverIsKilledEndsTheOthersLongBeforeTheDeadline) {
  for (const int killed : {0, 2}) {
    fs::remove_all(folder_ / "run");
    fs::create_directory(folder_ / "run");
    folder_.write("run/flight.rank7.json", "of an earlier run");
    Processes processes = training({{"parallel.prefetch", "2"}});
    EXPECT_FALSE(exists("run/flight.rank7.json"));
    processes[killed].send(SIGKILL);
    expect_failed(processes.wait(),
                  {fmt::format("expected 3 processes, lost process {} (", killed),
                   "ended without a word", "what each rank called last: ",
                   "--flight " + folder_ / "run/flight*.json" + " says who was late"},
                  killed);
    for (int p = 0; p < 3; ++p) {
      const std::string name =
          p == 0 ? "run/flight.json" : fmt::format("run/flight.rank{}.json", p);
      EXPECT_EQ(exists(name), p != killed) << name;
      if (p != killed) {
        EXPECT_TRUE(testing::is_json(folder_.read(name))) << name;
      }
    }
  }
}

TEST_F(ProcessFaults, ASaveInWhichOneIsKilledOrHasNoRoomLeavesTheLastCheckpoint) {
  flags_["train.steps"] = "6";
  flags_["train.accum"] = "2";
  flags_["model.dropout"] = "0.1";
  const std::string whole = sha256_of(start(3).wait());
  flags_["checkpoint.every"] = "2";
  flags_["resume"] = "auto";
  const std::string at = below(folder_, "run/checkpoints/step_4");
  const struct {
    int process;
    Fault fault;
    std::string says;
  } cases[] = {
      {0, {"rename", at, 1, "kill"}, "lost process 0 ("},
      {0, {"write", at, 1, "kill"}, "lost process 0 ("},
      {2, {"write", at, 1, "kill"}, "lost process 2 ("},
      {1, {"write", at, 1, std::to_string(ENOSPC)}, "No space left on device"},
      {0, {"write", at, 1, std::to_string(ENOSPC)}, "No space left on device"},
  };
  for (const auto& c : cases) {
    fs::remove_all(folder_ / "run");
    const auto all = start(3, {}, {{c.process, {.environment = with_fault(c.fault)}}}).wait();
    const bool is_killed = c.fault.action == "kill";
    expect_failed(all, {c.says}, is_killed ? c.process : -1);
    EXPECT_EQ(folder_.read("run/checkpoints/latest"), "step_2\n");
    EXPECT_FALSE(exists("run/checkpoints/step_4"));
    const auto again = start(3).wait();
    EXPECT_EQ(sha256_of(again), whole);
    EXPECT_TRUE(has(again[0].out, {"resumed after step 2 of 3 ranks"}));
  }
}

// As where files lie on another machine, which shows each host what it remembers.
TEST_F(ProcessFaults, ACheckpointThatOneSeesLateIsReadByAll) {
  flags_["model.dropout"] = "0.1";
  flags_["train.schedule"] = "constant";
  const std::string whole = sha256_of(start(2, {{"train.steps", "4"}}).wait());
  fs::remove_all(folder_ / "run");
  const std::string at = folder_ / "run/checkpoints";
  sha256_of(start(2, {{"train.steps", "2"}, {"checkpoint.every", "2"}}).wait());
  const std::string manifest = below(folder_, "run/checkpoints/step_2/manifest.json"),
                    states = below(folder_, "run/checkpoints/step_2/state-00000");
  const struct {
    std::string from;
    Fault fault;
  } cases[] = {
      {"auto", {"open", manifest, 1, std::to_string(ENOENT)}},
      {"auto", {"open", states, 1, std::to_string(ENOENT)}},
      {"auto", {"open", manifest, 1, std::to_string(ESTALE)}},
      {at + "/step_2", {"open", manifest, 1, std::to_string(ENOENT)}},
      {at, {"opendir", below(folder_, "run/checkpoints"), 1, std::to_string(EIO)}},
  };
  for (const auto& c : cases) {
    const auto all = start(2, {{"train.steps", "4"}, {"resume", c.from}},
                           {{1, {.environment = with_fault(c.fault)}}})
                         .wait();
    EXPECT_EQ(sha256_of(all), whole) << c.from << " " << c.fault.text();
    EXPECT_TRUE(has(all[0].out, {"resumed after step 2 of 2 ranks"}));
  }
}

TEST_F(ProcessFaults, WhoeverIsStoppedForAWhileIsLateInTheLog) {
  Processes processes = training({{"train.batch", "64"}});
  // More than once: the others may have met it just before.
  for (int i = 0; i < 6; ++i) {
    processes[1].send(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    processes[1].send(SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + 7 * i));
  }
  const auto num_lines = [&] {
    const std::string log = folder_.read("run/log.jsonl");
    return std::ranges::count(log, '\n');
  };
  const auto before = num_lines();
  wait_until(processes, [&] { return num_lines() > before + 3; });
  processes[0].send(SIGTERM);
  sha256_of(processes.wait());
  double late_ms = 0;
  for (const json& record : log_lines()) {
    if (record.value("late_rank", -1) == 1) late_ms += record.at("late_ms").get<double>();
  }
  EXPECT_GT(late_ms, 150);
}

TEST_F(ProcessFaults, OneThatIsShortOfMemoryEndsTheOthersBeforeAndInTraining) {
  for (const bool checks : {true, false}) {
    const Flags flags = {{"model.layers", "1"}, {"model.dim", "256"},
                         {"model.heads", "4"},  {"model.seq", "512"},
                         {"train.batch", "32"}, {"memory_check", checks ? "true" : "false"}};
    const auto all = start(2, flags, {{1, {.before = "ulimit -v 400000"}}}).wait();
    expect_failed(all, {checks ? "[memory] expected " : "rank 1: "});
    EXPECT_TRUE(has(all[0].err, {checks ? "got an error of process 1 (" : "by rank 1: "}));
  }
}

// Asked to end
// ------------------------------------------------------------------------------------------------

TEST_F(ProcessFaults, ASignalToOneEndsAllAfterTheSameStepWithACheckpoint) {
  for (const int told : {0, 1}) {
    fs::remove_all(folder_ / "run");
    Processes processes = training({{"checkpoint.every", "1000000"}});
    processes[told].send(SIGTERM);
    const auto all = processes.wait();
    sha256_of(all);
    for (int p = 0; p < 3; ++p) {
      EXPECT_EQ(without_waiting(all[static_cast<std::size_t>(p)].err),
                p == told ? "SIGTERM: ending soon; another one ends at once\n" : "");
    }
    const json last = final_record();
    EXPECT_EQ(last.at("stopped_by"), "SIGTERM");
    const std::string step = std::to_string(last.at("steps").get<std::int64_t>());
    EXPECT_EQ(folder_.read("run/checkpoints/latest"), "step_" + step + "\n");
    EXPECT_TRUE(has(all[0].out, {"stopped by SIGTERM after step " + step + " of ",
                                 "no model saved (save.final is empty); the checkpoint of step " +
                                     step + " has it\n"}));
  }
}

using testing::LostProcessTest;
using testing::StoppedProcessTest;

const testing::JobKind kProcesses = {.name = "gloo"};
const testing::JobKind kPairs = {
    .name = "gloo_and_threads", .num_processes = 2, .flags = {{"parallel.threads", "2"}}};
INSTANTIATE_TEST_SUITE_P(Jobs, LostProcessTest, ::testing::Values(kProcesses, kPairs),
                         testing::kind_name);
INSTANTIATE_TEST_SUITE_P(Jobs, StoppedProcessTest, ::testing::Values(kProcesses),
                         testing::kind_name);

}  // namespace
}  // namespace tessera
