#include "tools/config/unused_options.h"

#include "engine/error.h"
#include "shard/placement.h"

namespace tessera::tools {

using engine::require;

void check_unused_on_cpu(const FlagSet& flags, bool on_gpus) {
  for (const char* name : {"cuda.tune_gemm", "cuda.gemm_algorithms"}) {
    require(on_gpus || !flags.is_given(name),
            "[config] expected {} on GPUs only, got it where the device is the CPU", name);
  }
}

void check_unused_by_strategy(const TrainConfig& config, const FlagSet& flags) {
  require(config.parallel.preset().parameters != shard::Place::kWhole ||
              config.parallel.prefetch == 0 || !flags.is_given("parallel.prefetch"),
          "[config] expected parallel.prefetch where units are gathered, got {} with "
          "parallel.strategy={}, whose parameters stay whole",
          config.parallel.prefetch, config.parallel.strategy);
}

}  // namespace tessera::tools
