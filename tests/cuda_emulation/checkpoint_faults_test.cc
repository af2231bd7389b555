// Checkpoints of GPUs whose host has no page-locked memory left for the copy.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/folder.h"
#include "tests/emulator/control.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using testing::CheckpointRank;
using testing::CheckpointRun;
using testing::error_of;
using testing::has;

constexpr std::size_t kRoomForMeetings = std::size_t{64} << 10;

TEST(CheckpointFaults, ACopyForWhichThereIsNoMemoryIsToldToAllAndTheTrainingGoesOn) {
  const testing::TempFolder folder;
  CheckpointRun run{
      .training = {.ranks = 2, .steps = 3, .numel = 40'000, .adamw = true, .num_gpus = 2},
      .checkpoints = {.folder = folder / "c"},
      .save_every = 0};
  run.training.options.placement = Placement::preset("zero3");
  const std::vector<float> expected = testing::train_saving(run).values;
  std::vector<std::string> errors(2);
  run.behind_step = [&](const CheckpointRank& rank, int step) {
    const auto set_room = [&](std::size_t nbytes) {
      rank.world.barrier("before");
      if (rank.world.rank() == 0) {
        cuda_emulation::Settings settings = cuda_emulation::settings();
        settings.pinned_nbytes = nbytes;
        cuda_emulation::configure(settings);
      }
      rank.world.barrier("behind");
    };
    if (step == 0) {
      const auto used = static_cast<std::size_t>(cuda_emulation::live().pinned_nbytes);
      set_room(used + kRoomForMeetings);
      errors[static_cast<std::size_t>(rank.world.rank())] =
          error_of<engine::DeviceError>([&] { rank.checkpointer.save(1, {}); });
      set_room(cuda_emulation::Settings().pinned_nbytes);
    } else {
      rank.checkpointer.save(step + 1, {});
    }
    return true;
  };
  EXPECT_EQ(testing::train_saving(run).values, expected);
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_TRUE(has(
      errors[0], {"[memory] expected ", " bytes for workspace on pinned:0, got none", "(rank 1)"}));
  EXPECT_EQ(steps_in(folder / "c"), (std::vector<std::int64_t>{3, 2}));
}

}  // namespace
}  // namespace tessera::shard
