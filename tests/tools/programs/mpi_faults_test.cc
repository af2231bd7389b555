// Trainings that mpirun of Open MPI has started, and what goes wrong with one of their processes.
// mpirun ends the others a second after one has, or crashes at times when several end at once: some
// have no time to say why. None hangs, none is left, the exit code says so, and whoever speaks
// names who it was. Told to leave the others alone, mpirun lets all of them speak, and returns 0.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/mpi_training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using testing::below;
using testing::Flags;
using testing::has;
using testing::MpiProcesses;
using testing::Own;
using testing::with_fault;

const Flags kForever = {{"train.steps", "1000000000"}, {"train.schedule", "constant"}};
const std::vector<std::string> kLeaveOthersAlone = {"--enable-recovery"};

class MpiFaults : public testing::MpiTraining {
 protected:
  /// Three processes that have logged some steps.
  MpiProcesses training(const Flags& more = {}, const std::vector<std::string>& options = {}) {
    fs::remove_all(folder_ / "run");
    Flags flags = more;
    flags.insert(kForever.begin(), kForever.end());
    MpiProcesses processes = mpirun(3, flags, {}, options);
    wait_for_steps(processes, 3);
    return processes;
  }
  void wait_for_steps(MpiProcesses& processes, std::int64_t num) const {
    const auto has_logged = [&, before = num_lines()] { return num_lines() >= before + num; };
    wait_until(processes, has_logged);
  }
  std::int64_t num_lines() const {
    const std::string log = folder_.read("run/log.jsonl");
    return std::ranges::count(log, '\n');
  }
  /// Whoever told of an error said this of it.
  static void expect_failed(const MpiProcesses::End& end, const std::string& says) {
    EXPECT_NE(end.mpirun.exit_code, 0);
    for (const std::string& err : end.err) {
      if (err.find("error: ") == std::string::npos) continue;
      EXPECT_TRUE(has(err, {says}));
    }
  }
  /// All but `lost` said this.
  static void expect_said(const MpiProcesses::End& end, const std::string& says, int lost) {
    for (int p = 0; p < std::ssize(end.err); ++p) {
      if (p == lost) continue;
      EXPECT_TRUE(has(end.err[static_cast<std::size_t>(p)], {says})) << "process " << p;
    }
  }
};

TEST_F(MpiFaults, OneThatIsKilledEndsAll) {
  for (const int killed : {0, 2}) {
    MpiProcesses processes = training();
    processes.send(killed, SIGKILL);
    expect_failed(processes.wait(), fmt::format("lost process {} (", killed));
  }
}

TEST_F(MpiFaults, OneThatIsKilledIsNamedByAllOthers) {
  {
    MpiProcesses processes = training({}, kLeaveOthersAlone);
    processes.send(2, SIGKILL);
    expect_said(processes.wait(), "lost process 2 (", 2);
  }
  // In a collective, as it waits for one that is stopped.
  MpiProcesses processes = training({}, kLeaveOthersAlone);
  processes.send(1, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(100));
  processes.send(0, SIGKILL);
  processes.send(1, SIGCONT);
  expect_said(processes.wait(), "lost process 0 (", 0);
}

TEST_F(MpiFaults, OneThatIsKilledOrExitsBeforeTheyMeetIsMissing) {
  for (const char* const action : {"kill", "exit"}) {
    const Own dies{.environment = with_fault({"send", "socket", 1, action})};
    expect_failed(mpirun(3, {{"parallel.deadline_s", "3"}}, {{1, dies}}).wait(),
                  "missing process 1");
  }
}

TEST_F(MpiFaults, OneThatFailsInASaveLeavesTheLastCheckpoint) {
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
    expect_failed(end, c.says);
    EXPECT_EQ(folder_.read("run/checkpoints/latest"), "step_2\n");
    EXPECT_FALSE(exists("run/checkpoints/step_4"));
  }
  const auto again = mpirun(3).wait();
  EXPECT_EQ(sha256_of(again.mpirun), whole);
  EXPECT_TRUE(has(again.mpirun.out, {"resumed after step 2 of 3 ranks"}));
}

TEST_F(MpiFaults, OneThatIsStoppedForLongerThanTheDeadlineIsNamed) {
  MpiProcesses processes = training({{"parallel.deadline_s", "2"}});
  processes.send(1, SIGSTOP);
  expect_failed(processes.wait(), "lost process 1 (");
}

TEST_F(MpiFaults, OneThatIsStoppedForAWhileChangesNoNumber) {
  MpiProcesses processes = training({{"checkpoint.every", "1000000"}});
  for (const int stopped : {1, 0}) {
    processes.send(stopped, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(500));
    processes.send(stopped, SIGCONT);
    wait_for_steps(processes, 3);
  }
  processes.mpirun().send(SIGUSR1);
  const auto end = processes.wait();
  const std::string sha256 = sha256_of(end.mpirun);
  const auto last = final_record();
  EXPECT_EQ(last.at("stopped_by"), "SIGUSR1");
  EXPECT_EQ(of_threads(3, {{"train.steps", testing::json_text(last.at("steps"))},
                           {"train.schedule", "constant"}}),
            sha256);
}

TEST_F(MpiFaults, OneThatStartsLateIsWaitedForAndOneThatNeverComesIsNamed) {
  EXPECT_EQ(sha256_of(mpirun(3, {}, {{0, {.before = "sleep 0.5"}}}).wait().mpirun),
            of_threads(3, {}));
  expect_failed(
      mpirun(3, {{"parallel.deadline_s", "2"}}, {{1, {.before = "sleep 1000; exit"}}}).wait(),
      "missing process 1");
}

TEST_F(MpiFaults, OneThatIsShortOfMemoryOrDataEndsAll) {
  expect_failed(mpirun(3, {}, {{1, {.flags = {{"data.path", folder_ / "none.txt"}}}}}).wait(),
                "none.txt");
  const Flags large = {
      {"model.dim", "256"}, {"model.seq", "512"}, {"train.batch", "32"}, {"memory_check", "false"}};
  expect_failed(mpirun(2, large, {{1, {.before = "ulimit -v 600000"}}}).wait(), "rank 1: ");
}

TEST_F(MpiFaults, AnMpirunThatIsKilledLeavesNoProcess) {
  MpiProcesses processes = training();
  processes.mpirun().send(SIGKILL);
  (void)processes.wait();
}

}  // namespace
}  // namespace tessera
