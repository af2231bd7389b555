// Trainings that the mpirun of an MPI has started, and what goes wrong with one of their processes.
// mpirun ends the others at most a second after one has, or crashes at times when several end at
// once: some have no time to say why. None hangs, none is left, the exit code says so, and whoever
// speaks names who it was. In the tests of LostProcessTest it is told to leave the others alone,
// and all of them speak.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/json.h"
#include "tests/testing/mpi_launcher.h"
#include "tests/testing/program.h"
#include "tests/tools/programs/lost_process_suite.h"
#include "tests/tools/testing/mpi_training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::below;
using testing::Flags;
using testing::has;
using testing::MpiProcesses;
using testing::Own;
using testing::with_fault;

const Flags kForever = {{"train.steps", "1000000000"}, {"train.schedule", "constant"}};
// Of processes that MPICH starts, which meet by MPI alone: it tells nobody who is missing.
const char* const kMpiDoesNotStart = "expected MPI to start before the deadline";

class MpiFaults : public testing::MpiTraining,
                  public ::testing::WithParamInterface<testing::MpiLauncher> {
 protected:
  MpiFaults() { launcher_ = GetParam(); }

  /// Three processes that have logged some steps.
  MpiProcesses training(const Flags& more = {}) {
    fs::remove_all(folder_ / "run");
    Flags flags = more;
    flags.insert(kForever.begin(), kForever.end());
    MpiProcesses processes = mpirun(3, flags);
    wait_until(processes, [&] {
      const std::string log = folder_.read("run/log.jsonl");
      return std::ranges::count(log, '\n') > 3;
    });
    return processes;
  }
  bool is_mpich() const { return launcher_.name == testing::mpich().name; }
  /// Whoever told of an error said this of it. `exits`: one has ended with 0, for which MPICH's
  /// mpirun at times ends the others and returns 0, too.
  void expect_failed(const MpiProcesses::End& end, const std::string& says,
                     bool exits = false) const {
    if (!exits || !is_mpich()) {
      EXPECT_NE(end.mpirun.exit_code, 0);
    }
    for (const std::string& err : end.err) {
      if (err.find("error: ") == std::string::npos) continue;
      EXPECT_TRUE(has(err, {says}));
    }
  }
};

TEST_P(MpiFaults, OneThatIsKilledEndsAll) {
  for (const int killed : {0, 2}) {
    MpiProcesses processes = training();
    processes.send(killed, SIGKILL);
    expect_failed(processes.wait(), fmt::format("lost process {} (", killed));
  }
}

TEST_P(MpiFaults, OneThatIsKilledOrExitsBeforeTheyMeetIsMissing) {
  for (const char* const action : {"kill", "exit"}) {
    const Own dies{.environment = with_fault({"send", "socket", 1, action})};
    expect_failed(mpirun(3, {{"parallel.deadline_s", "3"}}, {{1, dies}}).wait(),
                  "missing process 1", action == std::string("exit"));
  }
}

TEST_P(MpiFaults, OneThatFailsInASaveLeavesTheLastCheckpoint) {
  flags_["train.steps"] = "6";
  flags_["train.accum"] = "2";
  flags_["model.dropout"] = "0.1";
  const std::string whole = of_threads(3, {});
  flags_["checkpoint.every"] = "2";
  flags_["resume"] = "auto";
  const std::string at = below(folder_, "run/checkpoints/step_4");
  const struct {
    int process;
    testing::Fault fault;
    std::string says;
  } cases[] = {
      {0, {"rename", at, 1, "kill"}, "lost process 0 ("},
      {2, {"write", at, 1, "exit"}, "lost process 2 ("},
      {1, {"write", at, 1, std::to_string(ENOSPC)}, "No space left on device"},
  };
  for (const auto& c : cases) {
    fs::remove_all(folder_ / "run");
    const auto end = mpirun(3, {}, {{c.process, {.environment = with_fault(c.fault)}}}).wait();
    expect_failed(end, c.says, c.fault.action == "exit");
    EXPECT_EQ(folder_.read("run/checkpoints/latest"), "step_2\n");
    EXPECT_FALSE(exists("run/checkpoints/step_4"));
  }
  const auto again = mpirun(3).wait();
  EXPECT_EQ(sha256_of(again.mpirun), whole);
  EXPECT_TRUE(has(again.mpirun.out, {"resumed after step 2 of 3 ranks"}));
}

TEST_P(MpiFaults, SigUsr1ToMpirunEndsAllAfterTheSameStep) {
  MpiProcesses processes = training();
  processes.mpirun().send(SIGUSR1);
  const auto end = processes.wait();
  const std::string sha256 = sha256_of(end.mpirun);
  const auto last = final_record();
  EXPECT_EQ(last.at("stopped_by"), "SIGUSR1");
  EXPECT_EQ(of_threads(3, {{"train.steps", testing::json_text(last.at("steps"))},
                           {"train.schedule", "constant"}}),
            sha256);
}

TEST_P(MpiFaults, OneThatStartsLateIsWaitedForAndOneThatNeverComesIsNamed) {
  EXPECT_EQ(sha256_of(mpirun(3, {}, {{0, {.before = "sleep 0.5"}}}).wait().mpirun),
            of_threads(3, {}));
  expect_failed(
      mpirun(3, {{"parallel.deadline_s", "2"}}, {{1, {.before = "sleep 1000; exit"}}}).wait(),
      is_mpich() ? kMpiDoesNotStart : "missing process 1");
}

TEST_P(MpiFaults, OneThatIsShortOfMemoryOrDataEndsAll) {
  const auto end = mpirun(3, {{"parallel.deadline_s", "3"}},
                          {{1, {.flags = {{"data.path", folder_ / "none.txt"}}}}})
                       .wait();
  EXPECT_NE(end.mpirun.exit_code, 0);
  EXPECT_TRUE(has(end.err[1], {"error: ", "none.txt"}));
  for (const std::size_t p : {0, 2}) {
    if (has(end.err[p], {"error: "})) {
      EXPECT_TRUE(has(end.err[p], {is_mpich() ? kMpiDoesNotStart : "none.txt"}));
    }
  }
  const Flags large = {
      {"model.dim", "256"}, {"model.seq", "512"}, {"train.batch", "32"}, {"memory_check", "false"}};
  expect_failed(mpirun(2, large, {{1, {.before = "ulimit -v 600000"}}}).wait(), "rank 1: ");
}

TEST_P(MpiFaults, AnMpirunThatIsKilledLeavesNoProcess) {
  MpiProcesses processes = training();
  processes.mpirun().send(SIGKILL);
  (void)processes.wait();
}

INSTANTIATE_TEST_SUITE_P(Launchers, MpiFaults, ::testing::ValuesIn(testing::mpi_launchers()),
                         testing::launcher_name);

using testing::LostProcessTest;
using testing::StoppedProcessTest;

std::vector<testing::JobKind> processes() {
  std::vector<testing::JobKind> jobs;
  for (const testing::MpiLauncher& launcher : testing::mpi_launchers()) {
    jobs.push_back({.name = launcher.name, .launcher = launcher});
  }
  return jobs;
}
// Of Open MPI, whose mpirun lets all speak.
std::vector<testing::JobKind> pairs() {
  if (!fs::exists(testing::open_mpi().program)) return {};
  return {{.name = "openmpi_and_threads",
           .num_processes = 2,
           .flags = {{"parallel.threads", "2"}},
           .launcher = testing::open_mpi()}};
}
INSTANTIATE_TEST_SUITE_P(Processes, LostProcessTest, ::testing::ValuesIn(processes()),
                         testing::kind_name);
INSTANTIATE_TEST_SUITE_P(Pairs, LostProcessTest, ::testing::ValuesIn(pairs()), testing::kind_name);
INSTANTIATE_TEST_SUITE_P(Processes, StoppedProcessTest, ::testing::ValuesIn(processes()),
                         testing::kind_name);

}  // namespace
}  // namespace tessera
