// A training as a process of its own; see [Note: a process for each training] in request.h.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace tessera::tools {

struct ProcessEnd {
  int exit_code = 0;  ///< -1: a signal ended it
  int signal = 0;     ///< 0: none

  bool ok() const { return exit_code == 0; }
  std::string str() const;  ///< "exit code 1", "SIGKILL": for people
};

/// What starts a program as several processes, as "mpirun", "-n", "4"; none: it is started itself.
struct LauncherWords {
  std::vector<std::string> words = {};
  std::string path = {};  ///< of the first
};

/// Where `program` lies. Throws IoError unless it can be run.
std::string program_path(const std::string& program);

/// Before a training that writes to `folder`: waits while another one does, which stderr says. That
/// is one of a comparison that was killed, which ends after its step. Returns early when this
/// process is asked to stop; throws IoError after `patience`.
void wait_for_folder(const std::string& folder,
                     std::chrono::milliseconds patience = std::chrono::minutes(1));

/// Runs `program` to its end, what it prints going to the file `console`, which is replaced. When
/// this process is asked to stop (stop.h), so is that one, and it is waited for; when this one
/// dies, that one is asked to stop. Throws IoError for a console that cannot be written or a
/// program that cannot start.
///
/// A launcher is run in its place, before `program` and `arguments`. It has a process group of its
/// own: a request to stop, whichever it is, is one SIGTERM to all in it. Those that it leaves when
/// it ends are asked to stop, and killed after ten seconds; this process has no other children.
ProcessEnd run_process(const std::string& program, const std::vector<std::string>& arguments,
                       const std::string& console, const LauncherWords& launcher = {});

}  // namespace tessera::tools
