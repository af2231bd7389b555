// The training whose checkpoint is tests/golden/checkpoint_v1: with all that one can hold, a hook's
// errors, a buffer, and a frozen parameter in bf16.
#pragma once

#include <cstdint>
#include <vector>

#include "shard/hooks/hooks.h"
#include "tests/shard/checkpoint/checkpoint_run.h"

namespace tessera::testing {

inline CheckpointRun golden_run(int ranks, const char* strategy) {
  CheckpointRun run{
      .training = {.ranks = ranks, .steps = 3, .blocks = 2, .numel = 200, .adamw = true}};
  run.training.options.placement = shard::Placement::preset(strategy);
  run.training.options.precision.param = engine::DType::kBF16;
  shard::HookOptions hook;
  set_hook(hook, "batched_powersgd");
  hook.powersgd.start_step = 0;
  hook.powersgd.low_rank.min_compression_rate = 0;
  run.training.options.reducer = make_hook(hook);
  run.training.options.reducer_text = describe(hook);
  run.prepare = [](ToyModel& model) {
    const engine::Memory memory;
    model.root.buffers = {
        engine::Tensor::from<std::int64_t>(memory, {2}, std::vector<std::int64_t>{5, 6}, "count")};
    model.layers[1]->weight.trainable = false;
  };
  return run;
}

}  // namespace tessera::testing
