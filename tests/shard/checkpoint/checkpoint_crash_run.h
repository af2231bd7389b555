// The save that is killed at every system call.
#pragma once

#include <string>

#include "tests/shard/checkpoint/checkpoint_run.h"

namespace tessera::testing {

inline CheckpointRun crash_run(const std::string& folder, int steps, bool async) {
  CheckpointRun run{.training = {.steps = steps, .blocks = 1, .numel = 40, .adamw = true},
                    .checkpoints = {.folder = folder, .keep = 1, .async = async}};
  run.training.options.placement = shard::Placement::preset("zero3");
  return run;
}

}  // namespace tessera::testing
