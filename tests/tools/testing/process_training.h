// A tiny training whose ranks are processes, each with the variables that torchrun would set.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/probe/probe_record.h"

namespace tessera::testing {

using Environment = std::map<std::string, std::string>;

/// What one process has besides what all have.
struct Own {
  Flags flags = {};
  Environment environment = {};
  std::string before = {};  ///< what a shell does before it becomes this process
};

/// `words`, a program and its arguments, which a shell becomes after `before`.
inline std::vector<std::string> after(const std::string& before, std::vector<std::string> words) {
  if (before.empty()) return words;
  words.insert(words.begin(), {"/bin/sh", "-c", before + "; exec \"$0\" \"$@\""});
  return words;
}

/// The processes of one training.
class Processes {
 public:
  using Outcomes = std::vector<Outcome>;

  void add(std::unique_ptr<Program> program) { programs_.push_back(std::move(program)); }
  Program& operator[](int process) { return *programs_.at(static_cast<std::size_t>(process)); }
  void send(int process, int signal) { (*this)[process].send(signal); }
  bool has_ended(int process) { return (*this)[process].has_ended(); }
  bool all_ended() {
    bool ended = true;
    for (const auto& program : programs_) ended &= program->has_ended();
    return ended;
  }
  /// What the first one has said of errors, once it has ended.
  std::string first_error() { return programs_.front()->wait().err; }
  /// Of each, once all have ended. Those that go on for longer are killed, and fail the test.
  Outcomes wait(std::chrono::seconds longest = std::chrono::seconds(60)) {
    const auto end = std::chrono::steady_clock::now() + longest;
    while (!all_ended() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    Outcomes outcomes;
    for (std::size_t p = 0; p < programs_.size(); ++p) {
      const bool hangs = !programs_[p]->has_ended();
      if (hangs) programs_[p]->send(SIGKILL);
      outcomes.push_back(programs_[p]->wait());
      EXPECT_FALSE(hangs) << "process " << p << " did not end: " << outcomes.back().err;
    }
    return outcomes;
  }

 private:
  std::vector<std::unique_ptr<Program>> programs_;
};

class ProcessTraining : public TinyTraining {
 protected:
  ProcessTraining() { flags_.erase("parallel.ranks"); }

  /// Of as many ranks that are threads.
  std::string of_threads(int num_ranks, Flags more, const std::string& program = kTransformer) {
    more["parallel.ranks"] = std::to_string(num_ranks);
    more["out"] = folder_ / "threads";
    if (more.contains("log.probe")) more["log.probe"] = folder_ / "threads.jsonl";
    return sha256_of(run_program(program, with(more)));
  }

  /// `own`: of some processes, by number. They find each other by a name that no other job has.
  Processes start(int num_processes, const Flags& more = {}, const std::map<int, Own>& own = {},
                  const std::string& program = kTransformer) const {
    Processes processes;
    const std::string job = new_job();
    for (int p = 0; p < num_processes; ++p) {
      const auto found = own.find(p);
      processes.add(start_one(job, p, num_processes, more,
                              found == own.end() ? Own() : found->second, program));
    }
    return processes;
  }
  std::string new_job() const {
    static int num_jobs = 0;
    return std::to_string(::getpid()) + "." + std::to_string(++num_jobs);
  }
  std::unique_ptr<Program> start_one(const std::string& job, int process, int num_processes,
                                     const Flags& more, const Own& own = {},
                                     const std::string& program = kTransformer) const {
    const std::string p = std::to_string(process), n = std::to_string(num_processes);
    Environment environment = own.environment;
    environment.merge(Environment{{"TORCHELASTIC_RUN_ID", job},
                                  {"RANK", p},
                                  {"WORLD_SIZE", n},
                                  {"LOCAL_RANK", p},
                                  {"LOCAL_WORLD_SIZE", n},
                                  {"GROUP_RANK", "0"},
                                  {"GROUP_WORLD_SIZE", "1"},
                                  {"MASTER_ADDR", "127.0.0.1"},
                                  {"MASTER_PORT", "29500"},
                                  // Where the loader finds the plug-in of this test's own build.
                                  {"LD_LIBRARY_PATH", std::filesystem::absolute("comm").string()}});
    const auto words = after(own.before, words_of(own, more, program));
    return std::make_unique<Program>(
        words[0], std::vector<std::string>(words.begin() + 1, words.end()), environment);
  }
  /// A process that has these, as a program and its arguments.
  std::vector<std::string> words_of(const Own& own, const Flags& more,
                                    const std::string& program = kTransformer) const {
    Flags flags = own.flags;
    flags.merge(with(more));
    auto words = arguments_of(flags);
    words.insert(words.begin(), std::filesystem::absolute(program).string());
    return words;
  }
  /// Waits until `done`, for a minute at most, and fails the test if the processes have ended
  /// before.
  template <class Running>
  static void wait_until(Running& processes, const std::function<bool()>& done) {
    for (int i = 0; i < 6000 && !done(); ++i) {
      ASSERT_FALSE(processes.all_ended()) << processes.first_error();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ASSERT_TRUE(done());
  }
  /// `err` without what processes of a busy machine say that wait long for each other.
  static std::string without_waiting(std::string err) {
    for (std::size_t at = 0; at < err.size();) {
      const std::size_t end = std::min(err.find('\n', at), err.size() - 1) + 1;
      if (err.compare(at, 12, "waiting for ") == 0) {
        err.erase(at, end - at);
      } else {
        at = end;
      }
    }
    return err;
  }
  /// What a probe recorded, whoever wrote it and when: the lines of all parts in one order.
  static std::vector<std::string> lines_of_record(const std::string& path) {
    const tools::ProbeRun run = tools::read_probe_run(path);
    EXPECT_EQ(run.header.local_ranks, run.header.ranks);
    std::vector<std::string> lines;
    for (const tools::ProbePart& part : run.parts) lines.push_back(tools::part_text(part));
    std::ranges::sort(lines);
    lines.push_back("last step " + std::to_string(run.last_step));
    return lines;
  }
  /// "" and a failed test unless the run ended well.
  static std::string sha256_of(const Outcome& outcome) {
    constexpr std::string_view kName = "parameters sha256 ";
    const std::size_t at = outcome.out.find(kName);
    EXPECT_TRUE(outcome.exit_code == 0 && at != std::string::npos) << outcome.out << outcome.err;
    return at == std::string::npos ? "" : outcome.out.substr(at + kName.size(), 64);
  }
  /// Of rank 0, which alone says it. All must have ended well.
  static std::string sha256_of(const Processes::Outcomes& outcomes) {
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
      if (&outcome != &outcomes.front()) {
        EXPECT_EQ(outcome.out, "");
      }
    }
    return sha256_of(outcomes.front());
  }
};

}  // namespace tessera::testing
