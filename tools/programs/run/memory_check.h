// Whether this machine's memory holds what a training takes, found from its plan before ranks
// start: beyond its limits the kernel ends a process without a word.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tools/launch/ranks.h"
#include "tools/machine/limits.h"
#include "tools/planning/planner.h"
#include "tools/report/local_ranks.h"
#include "tools/train/task.h"

namespace tessera::tools {

/// The host's memory that ranks take together, by their plans: on CPUs all that
/// they hold, on GPUs what is offloaded.
struct HostMemory {
  std::int64_t nbytes = 0;
  std::int64_t most_nbytes = 0;  ///< of the rank that takes most
};

/// `plan` plans one rank of each `kind`, as rank_kind() returns it.
HostMemory host_memory(const LocalRanks& ranks, bool on_gpus,
                       const std::function<std::string(int rank)>& kind,
                       const std::function<TrainPlan(int rank)>& plan);

/// How much memory is needed and how much there is, and what to try.
struct MemoryShortage {
  std::string text = {};    ///< empty: there is none
  bool is_certain = false;  ///< else only with the blocks that ranks keep for reuse
};

/// What `ranks` ranks of `config`, which need `memory`, lack. Nothing where the machine tells no
/// limit.
MemoryShortage memory_shortage(const HostMemory& memory, const TrainConfig& config,
                               const Ranks& ranks, const MachineLimits& limits = read_limits());

/// What a prepared task lacks. Nothing for one that cannot be planned.
MemoryShortage memory_shortage(const Task& task, const Ranks& ranks);

/// A line that warns of a shortage; empty without. Throws DeviceError instead of one that is
/// certain where ranks are to start and memory_check says so.
std::string check_shortage(const MemoryShortage& shortage, const TrainConfig& config);

}  // namespace tessera::tools
