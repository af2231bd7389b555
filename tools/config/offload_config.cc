#include "tools/config/offload_config.h"

#include <algorithm>

#include "engine/error.h"
#include "tools/machine/limits.h"

namespace tessera::tools {

using engine::require;

void OffloadConfig::add_to(FlagSet& flags) {
  const auto fraction_flag = [&](const char* name, double* field, const char* help) {
    flags.add(name, field, NumberOption{.help = help, .min = 0, .max = 1});
  };
  fraction_flag(
      "offload.parameters", &parameters,
      "fraction of each rank's shard of the parameters that lies in page-locked memory of "
      "the host and is fetched ahead of its gather; of parameters that are whole on every "
      "rank the masters, which only bf16 has apart");
  fraction_flag("offload.gradients", &gradients,
                "fraction of each rank's sums of gradients that lies in page-locked memory of the "
                "host, where they are sent as units finish");
  fraction_flag("offload.optimizer", &optimizer,
                "fraction of each rank's states of the optimizer that lies in memory of the host, "
                "where threads of it update them");
  flags.add("offload.threads", &threads,
            {.help = "threads of the host that update and cast, for each rank; 0: the cores that "
                     "affinity and cgroups leave to this process, shared by the ranks; with "
                     "cpu.pin those of the rank",
             .min = 0,
             .max = 1024});
}

void OffloadConfig::validate(const shard::Placement& placement, const std::string& strategy,
                             const shard::Precision& precision) const {
  require(parameters == 0 || shard::can_offload_parameters(placement, precision),
          "[config] expected offload.parameters=0 with parallel.strategy={} and "
          "precision.param=f32, got {}: the masters are what is computed with",
          strategy, parameters);
  require(threads == 0 || any(),
          "[config] expected offload.threads with something to offload, got {} without", threads);
}

int OffloadConfig::threads_of_rank(const CpuConfig& cpu, int num_local) const {
  if (threads > 0) return static_cast<int>(threads);
  if (!any()) return 1;
  if (cpu.pin) return static_cast<int>(cpu.threads_per_rank);
  return std::max(1, read_limits().usable_cores() / num_local);
}

}  // namespace tessera::tools
