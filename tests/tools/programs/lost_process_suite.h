// What becomes of a training of which one process is lost, or stops for a while, whatever connects
// its processes. A test program links it and instantiates LostProcessTest and StoppedProcessTest
// with its jobs.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <variant>
#include <vector>

#include "tests/testing/mpi_launcher.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/mpi_training.h"
#include "tests/tools/testing/process_training.h"

namespace tessera::testing {

/// What starts the processes of a training, and what they are.
struct JobKind {
  std::string name;
  int num_processes = 3;
  Flags flags = {};
  std::optional<MpiLauncher> launcher = {};  ///< empty: they have torchrun's variables

  friend std::ostream& operator<<(std::ostream& out, const JobKind& kind) {
    return out << kind.name;
  }
};

inline std::string kind_name(const ::testing::TestParamInfo<JobKind>& info) {
  return info.param.name;
}

/// The processes of a training, whatever has started them.
class Job {
 public:
  /// Of a job that has ended.
  struct End {
    Outcome first;                 ///< of process 0, or of the launcher
    std::vector<int> exit_codes;   ///< of each process; none where the launcher hides them
    std::vector<std::string> err;  ///< of each process
  };

  explicit Job(std::variant<Processes, MpiProcesses> processes) : by_(std::move(processes)) {}

  void send(int process, int signal) {
    std::visit([&](auto& by) { by.send(process, signal); }, by_);
  }
  bool has_ended(int process) {
    return std::visit([&](auto& by) { return by.has_ended(process); }, by_);
  }
  bool all_ended() {
    return std::visit([](auto& by) { return by.all_ended(); }, by_);
  }
  std::string first_error() {
    return std::visit([](auto& by) { return by.first_error(); }, by_);
  }
  /// Fails the test if that takes long, or if a process is left.
  End wait();

 private:
  std::variant<Processes, MpiProcesses> by_;
};

class LostProcessTest : public MpiTraining, public ::testing::WithParamInterface<JobKind> {
 protected:
  LostProcessTest();

  static int num_processes() { return GetParam().num_processes; }
  /// The one that is lost: the last.
  static int lost() { return num_processes() - 1; }
  static int num_ranks();

  Job start(const Flags& more = {}, const std::map<int, Own>& own = {},
            const std::string& program = kTransformer) const;
  /// One that has logged some steps, and would go on for ever.
  Job training(const Flags& more = {}) const;
  void wait_for_steps(Job& job) const;

  /// Whether the launcher, if there is one, lets all end by themselves.
  static bool has_time_to_speak();
  /// How long it takes until all but the one that is lost have ended, a minute at most.
  static double seconds_until_others_ended(Job& job);
  /// All but `lost` have ended because of it, and say so.
  static void expect_named(const Job::End& end, const std::string& how,
                           int lost = num_processes() - 1);
};

/// Of a process that stops and goes on.
class StoppedProcessTest : public LostProcessTest {};

}  // namespace tessera::testing
