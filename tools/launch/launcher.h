// Which of several processes that were started together this one is, as who started it says in the
// environment.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/config/launcher_choice.h"
#include "tools/machine/environment.h"

namespace tessera::tools {

struct Launch {
  LauncherChoice by = LauncherChoice::kThreads;  ///< never kAuto
  int process = 0, num_processes = 1;
  int local_process = 0, num_local_processes = 1;  ///< on this host
  /// Not where processes are on several hosts and the launcher numbers none, as those of MPI. Of
  /// torchrun each agent is a host.
  std::optional<int> host = 0, num_hosts = 1;
  /// Of several processes, where they meet: "tcp:HOST:PORT+15", on the first port from PORT to
  /// PORT + 15 that is free on HOST, or "tcp:HOST:PORT". Empty where the launcher does not say.
  std::string address = {};
  /// Of several processes, the launcher's name for what it started together, equal in all of them.
  /// Empty where it has none.
  std::string job = {};
  /// Whether these processes can be those of an MPI, which finds its peers by the launcher.
  bool has_mpi = false;
  /// Whether that MPI finds them by PMI 1 or 2 alone, as MPICH and its kin do, and Open MPI only
  /// where it was built so; else by PMIx, or as `by` does.
  bool has_pmi = false;
  /// TESSERA_SECRET, which processes prove to each other that they have.
  std::string secret = {};
  /// GLOO_SOCKET_IFNAME: the network interface over which others reach this process by Gloo.
  std::string interface = {};
  std::vector<std::string> notes = {};  ///< what a person may not expect, a line each

  bool operator==(const Launch&) const = default;
  /// "torchrun, process 3 of 4 (1 of 2 on host 1 of 2)"
  std::string str() const;
  /// Of all of them, with ranks in each: "torchrun: 2 hosts x 2 processes x 1 thread", where hosts
  /// differ "torchrun: 3 processes on 2 hosts x 1 thread", "openmpi: 4 processes x 1 thread"
  /// where there may be any number of hosts.
  std::string all_str(int num_threads) const;
  /// Whether hosts have as many processes each, as far as this one can tell.
  bool has_equal_hosts() const {
    return num_hosts && num_local_processes * *num_hosts == num_processes;
  }
};

/// What `environment` says, which is heeded as `choice` asks for. With kAuto the innermost of those
/// who started each other counts: torchrun before the launchers of MPI, these before a step of
/// Slurm, that before RANK and WORLD_SIZE set by hand; and where there is none, this process is
/// alone. Empty variables count as unset. Throws InvalidArgument for a launcher that is asked for
/// and that has not started this process; for variables that are missing, no numbers, or that
/// contradict each other.
Launch find_launch(const Environment& environment, LauncherChoice choice);

/// Whether launchers say by this variable which of several a process is.
bool is_launch_variable(std::string_view name);

}  // namespace tessera::tools
