// A checkpoint that the first version wrote, which every later version loads.
//
// tests/golden/checkpoint_v1 was written by //tests/shard:write_golden_checkpoint. Python's
// safetensors 0.8.0 reads its model files: safe_open(path, "np") finds h.0.weight and h.0.bias
// whole, parts like scale[0:128] of the others, h.1.weight in BF16, and buffer/count in I64.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/io/xxh3.h"
#include "shard/hooks/hook.h"
#include "tests/shard/checkpoint/golden_checkpoint_run.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using testing::CheckpointRank;
using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::golden_run;
using testing::TempFolder;
using testing::train_saving;

constexpr const char* kGolden = "tests/golden/checkpoint_v1/step_3";

TEST(CheckpointGolden, IsLoadedByEveryLaterVersion) {
  for (const int ranks : {1, 2, 3}) {
    const TempFolder folder;
    CheckpointRun run = golden_run(ranks, ranks == 3 ? "ddp" : "zero3");
    run.checkpoints.folder = folder / "c";
    run.from = kGolden;
    run.at_end = [](const CheckpointRank& rank, int) {
      EXPECT_EQ(engine::to_vector<std::int64_t>(rank.fsdp.buffers()[0]),
                (std::vector<std::int64_t>{5, 6}));
      if (rank.world.size() != 2) return;
      // The error of the rank's own.
      std::vector<float> errors;
      for (const HookTensor& t : save_hooks(rank.fsdp)) {
        errors.insert(errors.end(), t.values.begin(), t.values.end());
      }
      EXPECT_EQ(fmt::format("{:016x}", engine::xxh3(std::as_bytes(std::span(errors)))),
                rank.world.rank() == 0 ? "eeee4cb15a77593f" : "4b4c44c085f90ed6");
    };
    const CheckpointResult result = train_saving(run);
    EXPECT_EQ(result.first_step, 3);
    EXPECT_EQ(result.saved_values, (std::map<std::string, std::string>{{"position", "3"}}));
    EXPECT_EQ(result.values.back(), 3);
    EXPECT_EQ(fmt::format("{:016x}", engine::xxh3(std::as_bytes(std::span(result.values)))),
              "446267802a346f1d");
  }
}

}  // namespace
}  // namespace tessera::shard
