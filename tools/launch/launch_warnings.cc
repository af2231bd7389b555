#include "tools/launch/launch_warnings.h"

#include <fmt/format.h>

#include "engine/error.h"
#include "tools/launch/launcher.h"

namespace tessera::tools {

std::vector<std::string> launch_warnings(const Environment& environment,
                                         const TrainConfig& config) {
  std::vector<std::string> lines;
  try {
    const Launch launch = find_launch(environment, LauncherChoice::kAuto);
    if (launch.num_processes > 1) {
      lines.push_back(fmt::format(
          "warning: {}: each process that a launcher starts trains a model of its own; start one, "
          "with --parallel.ranks={}",
          launch.str(), launch.num_processes));
    }
    for (const std::string& note : launch.notes) lines.push_back("warning: " + note);
  } catch (const engine::InvalidArgument& error) {
    lines.push_back(fmt::format("warning: {}", error.what()));
  }
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
