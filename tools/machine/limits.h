// How much of the machine this process may use: what the kernel has, and what a container, a batch
// system or an administrator leaves of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::tools {

struct MachineLimits {
  int num_cores = 0;                     ///< of the machine
  int num_allowed = 0;                   ///< that the affinity of this process lets it run on
  std::optional<double> cpu_quota = {};  ///< cores' worth of time that its cgroups allow
  std::int64_t memory_nbytes = 0;        ///< of the machine
  std::int64_t available_nbytes = 0;  ///< that programs can get without swapping, says the kernel
  std::optional<std::int64_t> cgroup_limit_nbytes = {};  ///< of its cgroup with least room
  std::int64_t cgroup_used_nbytes = 0;                   ///< in that cgroup

  /// Threads that can run at once: at least 1.
  int usable_cores() const;
  /// What this process can still get, as far as limits tell.
  std::int64_t usable_nbytes() const;
};

/// Reads /proc and /sys/fs/cgroup below `root` (tests give another), cgroups of version 1 and 2.
/// What cannot be read is 0, or no limit.
MachineLimits read_limits(const std::string& root = "");

/// The first line of a small file, without the line break; nothing if it cannot be read.
std::optional<std::string> first_line(const std::string& path);

}  // namespace tessera::tools
