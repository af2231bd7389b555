// A tiny training whose ranks are processes that the launcher of an MPI starts.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/mpi_launcher.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/process_training.h"

namespace tessera::testing {

/// mpirun and the processes that it has started.
class MpiProcesses {
 public:
  struct End {
    Outcome mpirun;                ///< `out`: of process 0
    std::vector<std::string> err;  ///< of each process
  };
  struct Command {
    Environment environment;
    std::string before;              ///< what a shell does before it
    std::vector<std::string> words;  ///< a program and its arguments
  };

  MpiProcesses(const MpiLauncher& launcher, const std::vector<Command>& commands,
               std::vector<std::string> options)
      : num_processes_(static_cast<int>(commands.size())) {
    options.insert(options.end(), launcher.options.begin(), launcher.options.end());
    for (int p = 0; p < num_processes_; ++p) {
      const Command& command = commands[static_cast<std::size_t>(p)];
      if (p > 0) options.emplace_back(":");
      options.insert(options.end(), {"-n", "1", "/usr/bin/env"});
      for (const auto& [name, value] : command.environment) options.push_back(name + "=" + value);
      const auto words = after("echo $$ > " + file("pid", p) + "; exec 2> " + file("err", p) +
                                   (command.before.empty() ? "" : "; ") + command.before,
                               command.words);
      options.insert(options.end(), words.begin(), words.end());
    }
    mpirun_ = std::make_unique<Program>(launcher.program, options, mpi_environment(250));
  }

  /// To one that has begun.
  void send(int process, int signal) const {
    const std::string pid = read("pid", process);
    ASSERT_NE(pid, "");
    ::kill(std::stoi(pid), signal);
  }
  Program& mpirun() { return *mpirun_; }
  /// Of one that has begun.
  bool has_ended(int process) const { return !read("pid", process).empty() && !lives(process); }
  bool all_ended() { return mpirun_->has_ended(); }
  std::string first_error() { return read("err", 0) + mpirun_->wait().err; }

  /// Once mpirun has ended. Fails the test if that takes long, or if it leaves a process.
  End wait() {
    EXPECT_TRUE(holds([&] { return all_ended(); }, std::chrono::seconds(90))) << "mpirun hangs";
    mpirun_->send(SIGKILL);
    End end{mpirun_->wait(), {}};
    for (int p = 0; p < num_processes_; ++p) {
      const bool has_ended = holds([&] { return !lives(p); }, std::chrono::seconds(20));
      if (!has_ended) send(p, SIGKILL);
      end.err.push_back(read("err", p));
      EXPECT_TRUE(has_ended) << "process " << p << " was left: " << end.err.back();
    }
    return end;
  }

 private:
  std::string file(const std::string& name, int process) const {
    return *folder_ / name + std::to_string(process);
  }
  std::string read(const std::string& name, int process) const {
    return folder_->read(name + std::to_string(process));
  }
  bool lives(int process) const {
    std::string pid = read("pid", process);
    std::erase(pid, '\n');
    // Empty, too, for one that has ended and that nobody has waited for.
    std::ifstream words("/proc/" + pid + "/cmdline");
    return !pid.empty() && words.peek() != std::ifstream::traits_type::eof();
  }
  template <class Condition>
  static bool holds(const Condition& condition, std::chrono::seconds longest) {
    const auto end = std::chrono::steady_clock::now() + longest;
    while (!condition() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return condition();
  }

  std::unique_ptr<const TempFolder> folder_ = std::make_unique<const TempFolder>();
  int num_processes_;
  std::unique_ptr<Program> mpirun_;
};

class MpiTraining : public ProcessTraining {
 protected:
  /// `own`: of some processes, by number. `options`: of mpirun.
  MpiProcesses mpirun(int num_processes, const Flags& more = {}, const std::map<int, Own>& own = {},
                      const std::vector<std::string>& options = {},
                      const std::string& program = kTransformer) const {
    std::vector<MpiProcesses::Command> commands;
    for (int p = 0; p < num_processes; ++p) {
      const auto found = own.find(p);
      const Own its = found == own.end() ? Own() : found->second;
      commands.push_back({its.environment, its.before, words_of(its, more, program)});
    }
    return {launcher_, commands, options};
  }

  MpiLauncher launcher_ = open_mpi();
};

}  // namespace tessera::testing
