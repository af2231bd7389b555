// A checkpoint is what its manifest says, whatever its folder is called, and belongs to a run.
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/reader.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

namespace fs = std::filesystem;
using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::error_of;
using testing::has;
using testing::TempFolder;
using testing::train_saving;
using Steps = std::vector<std::int64_t>;

CheckpointRun run_in(const std::string& folder, int steps) {
  CheckpointRun run;
  run.training.ranks = 2;
  run.training.steps = steps;
  run.checkpoints.folder = folder;
  run.checkpoints.async = false;
  run.checkpoints.keep = 0;
  return run;
}

std::string copied(const std::string& from, const std::string& to) {
  fs::copy(from, to, fs::copy_options::recursive);
  return to;
}

TEST(CheckpointNames, AreThoseOfTheirSteps) {
  EXPECT_EQ(step_of_name("step_0"), 0);
  EXPECT_EQ(step_of_name("step_120"), 120);
  for (const char* name :
       {"step_", "step_-1", "step_01", "step_1x", "step_1.tmp-0", "latest", ""}) {
    EXPECT_EQ(step_of_name(name), std::nullopt) << name;
  }
}

TEST(CheckpointNames, ACopyUnderAnotherNameIsPassedOverAloud) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 4);
  const std::vector<float> expected = train_saving(run).values;
  // A later name of an earlier step, an earlier name of a later one, and one between.
  copied(folder / "c/step_1", folder / "c/step_99");
  copied(folder / "c/step_4", folder / "c/step_0");
  fs::remove_all(folder / "c/step_3");
  copied(folder / "c/step_1", folder / "c/step_3");
  EXPECT_EQ(misnamed_step(folder / "c", 99), 1);
  EXPECT_EQ(misnamed_step(folder / "c", 0), 4);
  EXPECT_EQ(misnamed_step(folder / "c", 4), std::nullopt);
  EXPECT_EQ(misnamed_step(folder / "c", 5), std::nullopt) << "not there";
  const CheckpointResult again = train_saving(run);
  EXPECT_EQ(again.first_step, 4);
  EXPECT_EQ(again.values, expected);
  ASSERT_EQ(again.warnings.size(), 1u);
  EXPECT_TRUE(has(again.warnings[0], {"passed over, as it does not verify",
                                      "step_99 is in fact the checkpoint of step 1 ("}));
  // Saves go on after the newest, and the oldest of those whose name is true are pruned.
  run.training.steps = 7;
  run.checkpoints.keep = 2;
  const CheckpointResult more = train_saving(run);
  EXPECT_EQ(more.first_step, 4);
  EXPECT_EQ(steps_in(folder / "c"), (Steps{99, 7, 6, 3, 0}));
  ASSERT_EQ(more.warnings.size(), 2u);
  EXPECT_TRUE(has(more.warnings[1], {"passed over: step_3 is in fact", "of step 1 (",
                                     "\n  passed over: step_0 is in fact", "of step 4 ("}));
}

TEST(CheckpointNames, OfACopyThatIsNeededIsFreed) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 1);
  train_saving(run);
  copied(folder / "c/step_1", folder / "c/step_2");
  run.training.steps = 2;
  EXPECT_EQ(train_saving(run).first_step, 1);
  EXPECT_EQ(misnamed_step(folder / "c", 2), std::nullopt);
  EXPECT_EQ(misnamed_step(folder / "c", 1), std::nullopt);
  EXPECT_TRUE(fs::exists(folder / "c/step_2.damaged-0"));
  EXPECT_EQ(train_saving(run).first_step, 2);
}

TEST(CheckpointNames, ACopyThatIsMadeWhileTrainingEndsNoSave) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 4);
  run.behind_step = [&](const testing::CheckpointRank& rank, int step) {
    rank.world.barrier("before");
    if (rank.world.rank() == 0 && step == 1) copied(folder / "c/step_1", folder / "c/step_50");
    rank.world.barrier("behind");
    return true;
  };
  const CheckpointResult result = train_saving(run);
  EXPECT_EQ(steps_in(folder / "c"), (Steps{50, 4, 3, 2, 1}));
  ASSERT_EQ(result.warnings.size(), 1u);
  EXPECT_TRUE(has(result.warnings[0], {"passed over: step_50 is in fact the checkpoint of "
                                       "step 1 ("}));
}

TEST(CheckpointNames, WhatIsAskedForByItsPathIsTheNewestOrNot) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 3);
  train_saving(run);
  const std::string copy = copied(folder / "c/step_1", folder / "c/step_9");
  run.training.steps = 4;
  // Not mixed with step 3, which is the newest.
  run.from = copy;
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { train_saving(run); }),
                  {"expected a folder for what follows", "got one that has step 3"}));
  run.from = folder / "c/step_3";
  EXPECT_EQ(train_saving(run).first_step, 3);
  EXPECT_EQ(steps_in(folder / "c"), (Steps{9, 4, 3, 2, 1}));
}

TEST(CheckpointNames, AloneACopyIsNoCheckpoint) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 1);
  train_saving(run);
  fs::rename(folder / "c/step_1", folder / "c/step_7");
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { train_saving(run); }),
                  {"expected a checkpoint that verifies, got none", "step_7 is in fact"}));
}

// All checkpoints of a run have its name, whatever it went on from, and whichever way.
TEST(CheckpointNames, ARunKeepsItsNameWhenItGoesOn) {
  const TempFolder folder;
  const auto name_of = [&](const std::string& checkpoint) {
    return CheckpointReader(folder / checkpoint).manifest().run;
  };
  CheckpointRun run = run_in(folder / "c", 1);
  train_saving(run);
  const std::string name = name_of("c/step_1");
  EXPECT_EQ(name.size(), 32u);
  run.training.steps = 2;
  train_saving(run);
  EXPECT_EQ(name_of("c/step_2"), name) << "load_newest()";
  run.training.steps = 3;
  run.from = folder / "c/step_2";
  run.checkpoints.folder = folder / "d";
  train_saving(run);
  EXPECT_EQ(name_of("d/step_3"), name) << "load()";
  run.from.clear();
  run.resumes = false;
  run.training.steps = 1;
  run.checkpoints.folder = folder / "e";
  train_saving(run);
  EXPECT_NE(name_of("e/step_1"), name);
}

}  // namespace
}  // namespace tessera::shard
