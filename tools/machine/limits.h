// How much of the machine this process may use: what the kernel has, and what a container, a batch
// system or an administrator leaves of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// How much more memory this process can get, and what keeps it from more.
struct MemoryRoom {
  enum class By { kMachine, kCgroup, kAddressSpace };
  By by = By::kMachine;
  std::int64_t nbytes = 0;
  std::int64_t limit_nbytes = 0;  ///< of the machine, the cgroup or `ulimit -v`

  /// What keeps it from more, for people: "ulimit -v allows", before limit_nbytes.
  std::string_view limited_by() const;
};

struct MachineLimits {
  int num_cores = 0;                     ///< of the machine
  int num_allowed = 0;                   ///< that the affinity of this process lets it run on
  std::optional<double> cpu_quota = {};  ///< cores' worth of time that its cgroups allow
  std::int64_t memory_nbytes = 0;        ///< of the machine
  std::int64_t available_nbytes = 0;  ///< that programs can get without swapping, says the kernel
  std::optional<std::int64_t> cgroup_limit_nbytes = {};  ///< of its cgroup with least room
  std::int64_t cgroup_used_nbytes = 0;  ///< in that cgroup, without what it can give back
  std::int64_t swap_nbytes = 0;         ///< of the machine that is free
  std::int64_t cgroup_swap_nbytes = 0;  ///< of it what that cgroup may take
  std::optional<std::int64_t> address_limit_nbytes = {};  ///< of addresses: `ulimit -v`
  std::int64_t address_used_nbytes = 0;

  /// Threads that can run at once: at least 1.
  int usable_cores() const;
  /// What this process can still get without swapping, as far as limits tell.
  std::int64_t usable_nbytes() const;
  /// What it can get at all: beyond that the kernel ends it, or refuses. Nothing is known where the
  /// machine tells nothing.
  std::optional<MemoryRoom> memory_room() const;
};

/// The cores that the first thread of this process may run on, in order: to keep another thread to
/// some of them changes nothing. None if the system does not tell.
std::vector<std::size_t> allowed_cores();

/// Reads /proc and /sys/fs/cgroup below `root` (tests give another), cgroups of version 1 and 2.
/// What cannot be read is 0, or no limit.
MachineLimits read_limits(const std::string& root = "");

/// The first line of a small file, without the line break; nothing if it cannot be read.
std::optional<std::string> first_line(const std::string& path);

}  // namespace tessera::tools
