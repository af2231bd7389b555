#include "tools/machine/limits.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <span>
#include <string_view>

namespace tessera::tools {
namespace {

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// The number at the front of `text`, after spaces.
std::optional<std::int64_t> number(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

std::optional<std::int64_t> number_in(const std::string& path) {
  const auto line = first_line(path);
  return line ? number(*line) : std::nullopt;  // "max" is none
}

// "MemTotal:  65536 kB", which may be missing.
std::int64_t meminfo_nbytes(const std::vector<std::string>& lines, std::string_view key) {
  for (const std::string& line : lines) {
    if (line.starts_with(key)) return number(line.substr(key.size())).value_or(0) * 1024;
  }
  return 0;
}

struct Folders {
  std::vector<std::string> cpu, memory;  // of this process's cgroups and all above them
};

// `mount` and all folders from it down to `path`, which begins with a slash.
void add_chain(const std::string& mount, std::string path, std::vector<std::string>& folders) {
  for (;;) {
    while (path.ends_with('/')) path.pop_back();
    folders.push_back(mount + path);
    if (path.empty()) return;
    path.erase(path.rfind('/'));
  }
}

Folders cgroup_folders(const std::string& root) {
  Folders folders;
  const std::string mount = root + "/sys/fs/cgroup";
  for (const std::string& line : lines_of(root + "/proc/self/cgroup")) {  // 4:cpu,cpuacct:/path
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.find("/..", second) != std::string::npos) continue;
    std::string controllers = line.substr(first, second + 1 - first);  // with both colons
    std::replace(controllers.begin(), controllers.end(), ':', ',');
    const std::string path = line.substr(second + 1);
    if (!path.starts_with('/')) continue;
    if (controllers == ",,") {
      add_chain(mount, path, folders.cpu);
      add_chain(mount, path, folders.memory);
    }
    if (controllers.find(",cpu,") != std::string::npos) {
      add_chain(mount + "/cpu", path, folders.cpu);
    }
    if (controllers.find(",memory,") != std::string::npos) {
      add_chain(mount + "/memory", path, folders.memory);
    }
  }
  return folders;
}

// Version 2: "max 100000" or "150000 100000". Version 1: two files, -1 for none.
std::optional<double> quota_of(const std::string& folder) {
  std::optional<std::int64_t> quota, period;
  if (const auto line = first_line(folder + "/cpu.max")) {
    quota = number(*line);
    period = number(line->substr(std::min(line->find(' '), line->size())));
  } else {
    quota = number_in(folder + "/cpu.cfs_quota_us");
    period = number_in(folder + "/cpu.cfs_period_us");
  }
  if (!quota || *quota <= 0 || !period || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

// What the kernel takes back from a cgroup when memory is short: the cache of files, mapped ones
// too.
std::int64_t reclaimable_nbytes(const std::string& folder, bool is_v2) {
  constexpr std::array<std::string_view, 3> kV2 = {"inactive_file ", "active_file ",
                                                   "slab_reclaimable "};
  constexpr std::array<std::string_view, 2> kV1 = {"total_inactive_file ", "total_active_file "};
  std::int64_t nbytes = 0;
  for (const std::string& line : lines_of(folder + "/memory.stat")) {
    for (const std::string_view key : is_v2 ? std::span<const std::string_view>(kV2) : kV1) {
      if (line.starts_with(key)) nbytes += number(line.substr(key.size())).value_or(0);
    }
  }
  return nbytes;
}

// What a cgroup that has `reclaimable` bytes to give back may swap, of what the machine has free.
std::int64_t swap_of(const std::string& folder, bool is_v2, std::int64_t room,
                     std::int64_t reclaimable, std::int64_t free_nbytes) {
  std::optional<std::int64_t> left;
  if (is_v2) {
    const auto limit = number_in(folder + "/memory.swap.max");
    if (limit) left = *limit - number_in(folder + "/memory.swap.current").value_or(0);
  } else {  // memory and swap together
    const auto limit = number_in(folder + "/memory.memsw.limit_in_bytes");
    const auto used = number_in(folder + "/memory.memsw.usage_in_bytes");
    if (limit && used) left = *limit - (*used - reclaimable) - room;
  }
  return std::clamp<std::int64_t>(left.value_or(free_nbytes), 0, free_nbytes);
}

void read_memory_limit(const std::string& folder, MachineLimits& limits) {
  const auto v2 = number_in(folder + "/memory.max");
  const auto limit = v2 ? v2 : number_in(folder + "/memory.limit_in_bytes");
  // Version 1 says 2^63 less a page where there is no limit.
  if (!limit || *limit <= 0 || (limits.memory_nbytes > 0 && *limit >= limits.memory_nbytes)) return;
  const auto used = number_in(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  const std::int64_t reclaimable = reclaimable_nbytes(folder, v2.has_value());
  const std::int64_t in_use = std::max<std::int64_t>(used.value_or(0) - reclaimable, 0);
  if (limits.cgroup_limit_nbytes &&
      *limits.cgroup_limit_nbytes - limits.cgroup_used_nbytes <= *limit - in_use) {
    return;
  }
  limits.cgroup_limit_nbytes = limit;
  limits.cgroup_used_nbytes = in_use;
  limits.cgroup_swap_nbytes =
      swap_of(folder, v2.has_value(), *limit - in_use, reclaimable, limits.swap_nbytes);
}

void read_address_limit(const std::string& root, MachineLimits& limits) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  limits.address_limit_nbytes = static_cast<std::int64_t>(limit.rlim_cur);
  limits.address_used_nbytes =
      number_in(root + "/proc/self/statm").value_or(0) * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

int MachineLimits::usable_cores() const {
  const double quota = cpu_quota ? std::ceil(*cpu_quota) : num_allowed;
  return std::max(1, std::min(num_allowed, static_cast<int>(quota)));
}

std::int64_t MachineLimits::usable_nbytes() const {
  if (!cgroup_limit_nbytes) return available_nbytes;
  return std::min(available_nbytes,
                  std::max<std::int64_t>(*cgroup_limit_nbytes - cgroup_used_nbytes, 0));
}

std::string_view MemoryRoom::limited_by() const {
  switch (by) {
    case By::kMachine:
      return "this machine has";
    case By::kCgroup:
      return "a cgroup, as of a container or a batch job, allows";
    case By::kAddressSpace:
      return "ulimit -v allows";
  }
  return "";  // no other
}

std::optional<MemoryRoom> MachineLimits::memory_room() const {
  std::optional<MemoryRoom> least;
  const auto add = [&](MemoryRoom::By by, std::int64_t limit, std::int64_t left) {
    const MemoryRoom room{by, std::max<std::int64_t>(left, 0), limit};
    if (!least || room.nbytes < least->nbytes) least = room;
  };
  if (memory_nbytes > 0 && available_nbytes > 0) {
    add(MemoryRoom::By::kMachine, memory_nbytes, available_nbytes + swap_nbytes);
  }
  if (cgroup_limit_nbytes) {
    add(MemoryRoom::By::kCgroup, *cgroup_limit_nbytes,
        *cgroup_limit_nbytes - cgroup_used_nbytes + cgroup_swap_nbytes);
  }
  if (address_limit_nbytes) {
    add(MemoryRoom::By::kAddressSpace, *address_limit_nbytes,
        *address_limit_nbytes - address_used_nbytes);
  }
  return least;
}

std::vector<std::size_t> allowed_cores() {
  constexpr std::size_t kMost = std::size_t{1} << 16;
  std::vector<std::size_t> cores;
  for (std::size_t size = CPU_SETSIZE; size <= kMost; size *= 2) {  // until the system's mask fits
    std::vector<cpu_set_t> mask(size / CPU_SETSIZE);
    const std::size_t nbytes = mask.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(::getpid(), nbytes, mask.data()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    for (std::size_t core = 0; core < size; ++core) {
      if (CPU_ISSET_S(core, nbytes, mask.data())) cores.push_back(core);
    }
    break;
  }
  return cores;
}

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

MachineLimits read_limits(const std::string& root) {
  MachineLimits limits;
  for (const std::string& line : lines_of(root + "/proc/cpuinfo")) {
    limits.num_cores += line.starts_with("processor") ? 1 : 0;
  }
  const std::size_t num_allowed = allowed_cores().size();
  limits.num_allowed = num_allowed > 0 ? static_cast<int>(num_allowed) : limits.num_cores;
  limits.num_cores = std::max(limits.num_cores, limits.num_allowed);
  const std::vector<std::string> meminfo = lines_of(root + "/proc/meminfo");
  limits.memory_nbytes = meminfo_nbytes(meminfo, "MemTotal:");
  limits.available_nbytes = meminfo_nbytes(meminfo, "MemAvailable:");
  limits.swap_nbytes = meminfo_nbytes(meminfo, "SwapFree:");
  const Folders folders = cgroup_folders(root);
  for (const std::string& folder : folders.cpu) {
    const auto quota = quota_of(folder);
    if (quota && (!limits.cpu_quota || *quota < *limits.cpu_quota)) limits.cpu_quota = quota;
  }
  for (const std::string& folder : folders.memory) read_memory_limit(folder, limits);
  read_address_limit(root, limits);
  return limits;
}

}  // namespace tessera::tools
