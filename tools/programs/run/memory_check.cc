#include "tools/programs/run/memory_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <optional>

#include "engine/error.h"
#include "engine/memory.h"
#include "engine/out_of_memory.h"
#include "tools/planning/budget.h"
#include "tools/planning/task_plan.h"
#include "tools/report/advice.h"
#include "tools/report/step_text.h"

namespace tessera::tools {
namespace {

std::string bytes(std::int64_t nbytes) { return nbytes_text(static_cast<double>(nbytes)); }

std::string limit_text(const MemoryRoom& room) {
  return fmt::format("{} {}", room.limited_by(), bytes(room.limit_nbytes));
}

std::string ranks_text(int num_ranks) {
  return fmt::format("{} rank{}", num_ranks, num_ranks == 1 ? "" : "s");
}

// What takes less, in the words of the command line. `room_nbytes`: for all ranks.
std::string smaller(const TrainConfig& config, const Ranks& ranks, std::int64_t room_nbytes) {
  if (ranks.num_gpus > 0) return "offload less (--offload.*)";
  const std::int64_t mib = room_nbytes / ranks.local.num_on_host >> 20;
  const std::int64_t budget = config.memory_limit_nbytes();
  if (mib > 0 && (budget == 0 || budget > mib << 20)) {
    return fmt::format(
        "try --memory_budget={}MiB, for each rank (if nothing fits, it says what would)", mib);
  }
  if (ranks.size > 1) {
    return "try " + fewer_ranks(config, ranks.size, ranks.size / 2, ranks.launch.num_processes);
  }
  return "try a smaller --train.batch, or a smaller model";
}

// Of a plan that could not be made: it takes the addresses that a rank would take. None where
// nothing limits those.
MemoryShortage plan_shortage(const TrainConfig& config, const Ranks& ranks) {
  const std::optional<MemoryRoom> room = read_limits().memory_room();
  if (!room || room->by != MemoryRoom::By::kAddressSpace) return {};
  return {.text = fmt::format("[memory] expected more than {0} of the host's memory for each of "
                              "{1}, got {0} that are free for all: {2}; {3}",
                              bytes(room->nbytes), ranks_text(ranks.local.num_on_host),
                              limit_text(*room), smaller(config, ranks, room->nbytes)),
          .is_certain = true};
}

}  // namespace

HostMemory host_memory(const LocalRanks& ranks, bool on_gpus,
                       const std::function<std::string(int rank)>& kind,
                       const std::function<TrainPlan(int rank)>& plan) {
  std::map<std::string, std::int64_t> of_kind;
  HostMemory memory;
  for (const int rank : ranks.all()) {
    const auto [known, is_new] = of_kind.try_emplace(kind(rank), 0);
    if (is_new) {
      const TrainPlan p = plan(rank);
      const StepRecord& most = p.repeated ? *p.repeated : p.steps.back();
      known->second = std::max(p.steps.back().step_host_memory.peak_total_nbytes,
                               most.step_host_memory.peak_total_nbytes) +
                      (on_gpus ? 0 : peak_nbytes(p));
    }
    memory.nbytes += known->second;
    memory.most_nbytes = std::max(memory.most_nbytes, known->second);
  }
  return memory;
}

MemoryShortage memory_shortage(const HostMemory& memory, const TrainConfig& config,
                               const Ranks& ranks, const MachineLimits& limits) {
  const std::optional<MemoryRoom> room = limits.memory_room();
  constexpr double kKept = engine::Memory::kMaxReserved;
  const auto most = static_cast<std::int64_t>(kKept * static_cast<double>(memory.nbytes));
  if (!room || most <= room->nbytes) return {};
  const bool is_certain = memory.nbytes > room->nbytes;
  const std::string each = ranks.local.num_on_host == 1
                               ? ""
                               : fmt::format(" (up to {} each)", bytes(memory.most_nbytes));
  const auto wanted = is_certain
                          ? room->nbytes
                          : static_cast<std::int64_t>(static_cast<double>(room->nbytes) / kKept);
  return {.text = fmt::format(
              "[memory] expected {} of the host's memory for {}{}{}, got {} that are free: {}; {}",
              bytes(memory.nbytes), ranks_text(ranks.local.num_on_host), each,
              is_certain ? ""
                         : fmt::format(", and at times {} with blocks kept for reuse", bytes(most)),
              bytes(room->nbytes), limit_text(*room), smaller(config, ranks, wanted)),
          .is_certain = is_certain};
}

MemoryShortage memory_shortage(const Task& task, const Ranks& ranks) {
  const TrainConfig& config = task.config();
  const bool on_gpus = ranks.num_gpus > 0;
  if (on_gpus && !config.offload.any()) return {};
  HostMemory memory;
  try {
    memory = host_memory(
        ranks.local.on_host(), on_gpus,
        [&](int rank) {
          return rank_kind(without_budget(config), plan_target(ranks, config, rank),
                           task.rank()->model());
        },
        [&](int rank) { return plan_task(task, ranks, rank); });
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const engine::OutOfMemory&) {
    return plan_shortage(config, ranks);
  } catch (const std::exception&) {  // ranks say why, unless their steps depend on values
    return {};
  }
  return memory_shortage(memory, config, ranks);
}

std::string check_shortage(const MemoryShortage& shortage, const TrainConfig& config) {
  if (shortage.text.empty()) return "";
  const bool is_refused = shortage.is_certain && config.memory_check;
  engine::require<engine::DeviceError>(config.plan || !is_refused,
                                       "{}, or --memory_check=false to go on", shortage.text);
  return fmt::format("warning: {}{}", shortage.text, is_refused ? "; a training is refused" : "");
}

}  // namespace tessera::tools
