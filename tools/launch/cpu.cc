#include "tools/launch/cpu.h"

#include <fmt/format.h>
#include <sched.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "engine/cpu_choice.h"
#include "engine/error.h"
#include "engine/gemm/gemm.h"
#include "engine/isa.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/machine/environment.h"
#include "tools/machine/limits.h"

namespace tessera::tools {

void choose_cpu(const CpuConfig& config) {
  CpuWishes wishes = CpuWishes::of(environment());
  if (config.isa != "auto") wishes.isa = {config.isa, "cpu.isa"};
  if (config.gemm != "auto") wishes.gemm = {config.gemm, "cpu.gemm"};
  wishes.threads = {std::to_string(config.threads_per_rank), "cpu.threads_per_rank"};
  engine::choose_cpu(wishes.choice());
}

void check_pins(const CpuConfig& config, int num_ranks, const MachineLimits& limits) {
  if (!config.pin) return;
  const int count = limits.usable_cores();
  engine::require(num_ranks * config.threads_per_rank <= count,
                  "[cpu] expected a core for each thread of {} rank{} with {} thread{}, got {} "
                  "core{}{} (cpu.pin)",
                  num_ranks, num_ranks == 1 ? "" : "s", config.threads_per_rank,
                  config.threads_per_rank == 1 ? "" : "s", count, count == 1 ? "" : "s",
                  count < limits.num_allowed
                      ? fmt::format(", as a cgroup allows the time of {:.2f}", *limits.cpu_quota)
                      : "");
}

void pin_rank(const CpuConfig& config, const LocalRanks& ranks, int rank) {
  if (!config.pin) return;
  const std::size_t index = ranks.index(rank) + static_cast<std::size_t>(ranks.num_before);
  const std::vector<std::size_t> all = allowed_cores();
  const auto each = static_cast<std::size_t>(config.threads_per_rank);
  engine::require<engine::DeviceError>(
      all.size() / each > index,
      "[cpu] expected the system to have cores for rank {}, {} each, got {} (cpu.pin)", rank, each,
      all.size());
  std::vector<cpu_set_t> own(all.back() / CPU_SETSIZE + 1);
  const std::size_t nbytes = own.size() * sizeof(cpu_set_t);
  for (std::size_t i = 0; i < each; ++i) {
    CPU_SET_S(all[index * each + i], nbytes, own.data());
  }
  engine::require<engine::DeviceError>(sched_setaffinity(0, nbytes, own.data()) == 0,
                                       "[cpu] expected to keep rank {} to its cores, got {}", rank,
                                       std::strerror(errno));
}

std::string cpu_text() {
  const int num_threads = engine::threads_per_product();
  return fmt::format("{}, {}{}", name_of(engine::isa()), engine::gemm_library(),
                     num_threads == 1 ? "" : fmt::format(" with {} threads", num_threads));
}

}  // namespace tessera::tools
