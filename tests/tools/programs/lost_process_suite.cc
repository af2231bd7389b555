#include "tests/tools/programs/lost_process_suite.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <thread>
#include <utility>

#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/json.h"
#include "tools/cli/main.h"

namespace tessera::testing {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

namespace {

const std::string kBrokenTrainer = "tests/tools/programs/broken_trainer";
const Flags kForever = {{"train.steps", "1000000000"}, {"train.schedule", "constant"}};

Job::End end_of(Processes& by) {
  Job::End end;
  for (const Outcome& outcome : by.wait()) {
    if (end.err.empty()) end.first = outcome;
    end.exit_codes.push_back(outcome.exit_code);
    end.err.push_back(outcome.err);
  }
  return end;
}
Job::End end_of(MpiProcesses& by) {
  MpiProcesses::End end = by.wait();
  return {std::move(end.mpirun), {}, std::move(end.err)};
}

}  // namespace

Job::End Job::wait() {
  return std::visit([](auto& by) { return end_of(by); }, by_);
}

LostProcessTest::LostProcessTest() {
  for (const auto& [name, value] : GetParam().flags) flags_[name] = value;
  if (GetParam().launcher) launcher_ = *GetParam().launcher;
}

int LostProcessTest::num_ranks() {
  const auto threads = GetParam().flags.find("parallel.threads");
  return num_processes() * (threads == GetParam().flags.end() ? 1 : std::stoi(threads->second));
}

Job LostProcessTest::start(const Flags& more, const std::map<int, Own>& own,
                           const std::string& program) const {
  if (!GetParam().launcher) {
    return Job(ProcessTraining::start(num_processes(), more, own, program));
  }
  return Job(mpirun(num_processes(), more, own, launcher_.leave_others_alone, program));
}

Job LostProcessTest::training(const Flags& more) const {
  fs::remove_all(folder_ / "run");
  Flags flags = more;
  flags.insert(kForever.begin(), kForever.end());
  Job job = start(flags);
  wait_for_steps(job);
  return job;
}

void LostProcessTest::wait_for_steps(Job& job) const {
  const auto num_lines = [&] {
    const std::string log = folder_.read("run/log.jsonl");
    return std::ranges::count(log, '\n');
  };
  const auto before = num_lines();
  wait_until(job, [&] { return num_lines() > before + 3; });
}

double LostProcessTest::seconds_until_others_ended(Job& job) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  for (int p = 0; p < num_processes(); ++p) {
    while (p != lost() && !job.has_ended(p) && seconds() < 60) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }
  return seconds();
}

bool LostProcessTest::has_time_to_speak() {
  return !GetParam().launcher || !GetParam().launcher->leave_others_alone.empty();
}

void LostProcessTest::expect_named(const Job::End& end, const std::string& how, int lost) {
  for (int p = 0; p < num_processes(); ++p) {
    if (p == lost) continue;
    const auto i = static_cast<std::size_t>(p);
    if (has_time_to_speak() || has(end.err[i], {"error: "})) {
      EXPECT_TRUE(has(end.err[i], {fmt::format("lost process {} (", lost)})) << how << ", " << p;
    }
    if (!end.exit_codes.empty()) {
      EXPECT_EQ(end.exit_codes[i], tools::kTryAgain) << how << ", " << p;
    }
  }
}

TEST_P(LostProcessTest, OneThatIsKilledOrExitsEndsAllAtOnce) {
  std::vector<double> seconds;
  for (const std::string fault : {"kill", "exit"}) {
    fs::remove_all(folder_ / "run");
    Flags flags = kForever;
    flags["fault"] = fault;
    Job job = start(flags, {}, kBrokenTrainer);
    for (int i = 0; i < 30'000 && !job.has_ended(lost()); ++i) {
      std::this_thread::sleep_for(milliseconds(2));
    }
    seconds.push_back(seconds_until_others_ended(job));
    expect_named(job.wait(), fault + " in forward");
  }
  {
    Job job = training();
    const int waited_for = lost() - 1;
    job.send(waited_for, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(100));
    job.send(lost(), SIGKILL);
    job.send(waited_for, SIGCONT);
    seconds.push_back(seconds_until_others_ended(job));
    expect_named(job.wait(), "killed in a collective");
  }
  // Other programs may hold up one of them. Silence alone would be noticed after 10 s.
  EXPECT_LT(std::ranges::min(seconds), 2);
  EXPECT_LT(std::ranges::max(seconds), 10);
}

TEST_P(LostProcessTest, OneThatIsKilledInASaveLeavesTheLastCheckpoint) {
  flags_["train.steps"] = "6";
  flags_["checkpoint.every"] = "2";
  flags_["resume"] = "auto";
  const Fault fault = {"write", below(folder_, "run/checkpoints/step_4"), 1, "kill"};
  expect_named(start({}, {{lost(), {.environment = with_fault(fault)}}}).wait(), "save");
  EXPECT_EQ(folder_.read("run/checkpoints/latest"), "step_2\n");
  EXPECT_FALSE(exists("run/checkpoints/step_4"));
  const Job::End again = start().wait();
  EXPECT_NE(sha256_of(again.first), "");
  EXPECT_TRUE(has(again.first.out, {fmt::format("resumed after step 2 of {} rank", num_ranks())}));
}

TEST_P(StoppedProcessTest, ForLongerThanTheDeadlineIsNamedAndEndsToo) {
  Job job = training({{"parallel.deadline_s", "2"}});
  job.send(lost(), SIGSTOP);
  EXPECT_LT(seconds_until_others_ended(job), 10);
  job.send(lost(), SIGCONT);
  const Job::End end = job.wait();
  for (int p = 0; p < num_processes(); ++p) {
    const auto i = static_cast<std::size_t>(p);
    const bool has_spoken = has(end.err[i], {"error: "});
    EXPECT_TRUE(has_spoken || !has_time_to_speak()) << p;
    if (has_spoken && p != lost()) {
      EXPECT_TRUE(has(end.err[i], {fmt::format("lost process {} (", lost())}) ||
                  has(end.err[i], {" is missing"}))
          << end.err[i];
    }
    if (!end.exit_codes.empty()) {
      EXPECT_NE(end.exit_codes[i], 0) << p;
    }
  }
}

// Process 0 learns last why the job failed: after the stopped one had a second to hear it.
TEST_P(StoppedProcessTest, WhileAnotherIsKilledIsNotTakenForIt) {
  Job job = training();
  const int stopped = lost(), killed = lost() - 1;
  job.send(stopped, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(100));
  job.send(killed, SIGKILL);
  for (int i = 0; i < 30'000 && !job.has_ended(0); ++i) {
    std::this_thread::sleep_for(milliseconds(2));
  }
  job.send(stopped, SIGCONT);
  expect_named(job.wait(), "killed while another has stopped", killed);
}

TEST_P(StoppedProcessTest, ForAWhileChangesNoNumber) {
  Job job = training();
  for (const int stopped : {lost(), 0}) {
    job.send(stopped, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(500));
    job.send(stopped, SIGCONT);
    wait_for_steps(job);
  }
  job.send(0, SIGTERM);
  const std::string sha256 = sha256_of(job.wait().first);
  Flags flags = {{"train.steps", json_text(final_record().at("steps"))},
                 {"train.schedule", "constant"}};
  flags_.erase("parallel.threads");
  if (flags_["device"] == "cuda") {
    flags["cuda.gemm_algorithms"] = folder_ / "run/gemm_algorithms.txt";  // those of rank 0
  }
  EXPECT_EQ(of_threads(num_ranks(), flags), sha256);
}

}  // namespace tessera::testing
