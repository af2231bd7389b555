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
  return lines;
}

}  // namespace tessera::tools
