#include "tools/launch/launch_warnings.h"

#include <fmt/format.h>

namespace tessera::tools {

std::vector<std::string> launch_warnings(const Environment& environment, const Launch& launch,
                                         const TrainConfig& config) {
  std::vector<std::string> lines;
  for (const std::string& note : launch.notes) lines.push_back("warning: " + note);
  const auto threads = environment.find("TESSERA_CPU_THREADS");
  if (threads != environment.end() && count_of(threads->second) > 0 &&
      count_of(threads->second) != config.cpu.threads_per_rank) {
    lines.push_back(fmt::format(
        "warning: TESSERA_CPU_THREADS={} ignored: trainers go by --cpu.threads_per_rank={}",
        count_of(threads->second), config.cpu.threads_per_rank));
  }
  // What sets it to 1 everywhere, as torchrun does, asks for nothing.
  const auto omp = environment.find("OMP_NUM_THREADS");
  const int num_omp = omp == environment.end() ? 0 : count_of(omp->second);
  const ParallelConfig& parallel = config.parallel;
  const std::int64_t num_ranks = parallel.threads > 0                    ? parallel.threads
                                 : launch.by != LauncherChoice::kThreads ? 1
                                 : parallel.ranks > 0                    ? parallel.ranks
                                                                         : parallel.cpu_ranks;
  if (config.device != DeviceChoice::kCuda && num_omp > 1 &&
      num_omp != config.cpu.threads_per_rank &&
      num_omp != num_ranks * config.cpu.threads_per_rank) {
    lines.push_back(fmt::format(
        "note: OMP_NUM_THREADS={} not heeded: on the CPU {} rank{} with --cpu.threads_per_rank={} "
        "work{}, as --parallel.ranks says",
        num_omp, num_ranks, num_ranks == 1 ? "" : "s", config.cpu.threads_per_rank,
        num_ranks == 1 ? "s" : ""));
  }
  return lines;
}

}  // namespace tessera::tools
