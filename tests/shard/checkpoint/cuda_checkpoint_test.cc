// Checkpoints of GPUs: what they save CPUs load, and the other way round, and what is saved while
// training goes on is what was there at the call.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/cuda.h"
#include "shard/hooks/hooks.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::goes_on_unharmed;
using testing::TempFolder;
using testing::train_saving;

// Not 0 where these tests can run.
int num_gpus() {
  const int count = engine::kCudaBuilt ? engine::cuda::num_devices() : 0;
  EXPECT_GT(count, 0) << "these tests need a GPU";
  return std::clamp(count, 1, 2);
}

CheckpointRun run_on(int gpus, const char* strategy, int ranks, int steps) {
  CheckpointRun run{.training = {.ranks = ranks,
                                 .accum = 6 / ranks,
                                 .steps = steps,
                                 .adamw = true,
                                 .max_norm = 0.5,
                                 .poison = true,
                                 .num_gpus = gpus}};
  run.training.options.placement = Placement::preset(strategy);
  return run;
}

TEST(CudaCheckpoint, GpusAndCpusGoOnFromEachOther) {
  const TempFolder without;
  CheckpointRun whole = run_on(0, "zero3", 2, 5);
  whole.checkpoints.folder = without / "c";
  whole.save_every = 0;
  const CheckpointResult expected = train_saving(whole);
  for (const bool gpus_first : {true, false}) {
    for (const bool async : {true, false}) {
      for (const double offload : {0.0, 0.5}) {
        if (testing::kIsSlow && offload == 0) continue;
        const TempFolder folder;
        CheckpointRun first = run_on(gpus_first ? num_gpus() : 0, "zero3", 2, 3);
        CheckpointRun second = run_on(gpus_first ? 0 : num_gpus(), "ddp", 3, 5);
        if (gpus_first) {
          first.training.options.offload = {
              .parameters = offload, .gradients = offload, .optimizer = offload};
        } else {
          second.training.options.offload.optimizer = offload;  // the host counts its steps as well
        }
        first.checkpoints = second.checkpoints = {.folder = folder / "c", .async = async};
        first.training.delay_seed = 3;
        train_saving(first);
        const CheckpointResult result = train_saving(second);
        EXPECT_EQ(result.first_step, 3);
        EXPECT_TRUE(result.values == expected.values)
            << (gpus_first ? "GPUs first" : "CPUs first") << " offload " << offload;
      }
    }
  }
}

TEST(CudaCheckpoint, KeepsWhatAHookRemembers) {
  const TempFolder folder, without;
  CheckpointRun run = run_on(num_gpus(), "zero3", 2, 2);
  run.checkpoints.folder = folder / "c";
  HookOptions hook;
  set_hook(hook, "batched_powersgd");
  hook.powersgd.start_step = 1;
  hook.powersgd.low_rank.min_compression_rate = 0;
  run.training.options.reducer = make_hook(hook);
  run.training.options.reducer_text = describe(hook);
  train_saving(run);
  run.training.steps = 4;
  EXPECT_TRUE(goes_on_unharmed(run, 2, without / "c"));
}

TEST(CudaCheckpoint, WhatIsWrittenRightAfterTheCallIsNotSaved) {
  const TempFolder folder, without;
  CheckpointRun run = run_on(num_gpus(), "zero3", 2, 1);
  run.checkpoints.folder = folder / "c";
  run.training.delay_seed = 5;
  run.behind_save = [](const testing::CheckpointRank& rank, int) {
    for (const engine::Parameter* p : rank.fsdp.parameters()) {
      const std::vector<float> other(static_cast<std::size_t>(p->shape.numel()), 7);
      rank.fsdp.load(*p, other);
      rank.optimizer.load_state(*p, "m", other);
    }
    rank.fsdp.parameters_changed();
  };
  train_saving(run);
  EXPECT_TRUE(goes_on_unharmed(run, 1, without / "c"));
}

}  // namespace
}  // namespace tessera::shard
