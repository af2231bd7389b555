// Saves and loads where the disk fails: every rank hears of it, older checkpoints stay, the next
// save works, and nothing is left behind.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/checkpointer.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using engine::IoError;
using testing::below;
using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::error_of;
using testing::FaultHere;
using testing::has;
using testing::TempFolder;
using testing::train_saving;
using testing::train_saving_all;

namespace fs = std::filesystem;

using Steps = std::vector<std::int64_t>;
using Names = std::set<std::string>;

CheckpointRun run_in(const std::string& folder, int steps, bool async = false) {
  ::setenv("TEST_NO_FLUSH", "1", 1);
  CheckpointRun run{.training = {.steps = steps, .blocks = 1, .numel = 40, .adamw = true},
                    .checkpoints = {.folder = folder, .keep = 0, .async = async}};
  run.training.options.placement = Placement::preset("zero3");
  return run;
}

Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

std::vector<float> trained(int steps) {
  CheckpointRun run = run_in("", steps);
  const TempFolder folder;
  run.checkpoints.folder = folder / "c";
  run.save_every = 0;
  return train_saving(run).values;
}

// The calls of `calls` on paths with `part` below `folder`, in a run of three saves.
std::vector<std::string> calls_of(const std::string& calls, const std::string& part, int steps) {
  const TempFolder folder, log;
  {
    const FaultHere fault({calls, below(folder, part), 0, log / "log"});
    train_saving(run_in(folder / "c", steps));
  }
  std::vector<std::string> found;
  std::istringstream lines(log.read("log"));
  for (std::string line; std::getline(lines, line);) found.push_back(line);
  return found;
}

TEST(CheckpointFaults, EveryCallThatFailsIsAnErrorOnEveryRank) {
  const char* const calls = "write,fsync,close,rename,mkdir,create";
  const std::vector<float> expected = trained(3);
  const auto num_calls = static_cast<int>(calls_of(calls, "c/step_", 3).size());
  EXPECT_GT(num_calls, 90);
  for (const bool async : {false, true}) {
    int num_failed = 0;
    const int stride = testing::kIsSlow ? 20 : async ? 3 : 1;
    for (int at = 1; at <= num_calls; at += stride) {
      const TempFolder folder;
      CheckpointRun run = run_in(folder / "c", 3, async);
      run.goes_on = true;
      std::vector<CheckpointResult> results;
      {
        const FaultHere fault(
            {calls, below(folder, "c/step_"), at, std::to_string(at % 2 == 0 ? EIO : EACCES)});
        results = train_saving_all(run);
      }
      EXPECT_EQ(results[0].values, expected);
      EXPECT_EQ(results[0].errors, results[1].errors);
      ASSERT_LE(results[0].errors.size(), 1u) << "call " << at;
      for (const std::string& error : results[0].errors) {
        ++num_failed;
        const char* const cause = at % 2 == 0 ? "Input/output error" : "Permission denied";
        EXPECT_TRUE(has(error, {cause, "step_", "(rank"})) << "call " << at;
      }
      // What failed left nothing; while training goes on it may be told of by the next save,
      // instead.
      const std::size_t num_saved = steps_in(folder / "c").size();
      EXPECT_LE(num_saved + results[0].errors.size(), 3u);
      EXPECT_GE(num_saved + results[0].errors.size(), async ? 2u : 3u) << "call " << at;
      EXPECT_EQ(names_in(folder / "c").size(), num_saved + (num_saved == 0 ? 1 : 2));
      run = run_in(folder / "c", 4, async);
      const CheckpointResult next = train_saving(run);
      EXPECT_EQ(steps_in(folder / "c").front(), 4);
      ASSERT_FALSE(::testing::Test::HasFailure()) << "call " << at;
    }
    // The others close a folder that is flushed.
    EXPECT_GE(num_failed, num_calls / stride - 3);
  }
}

TEST(CheckpointFaults, WhatIsInterruptedOrShortIsContinued) {
  const std::vector<float> expected = trained(3);
  for (const char* action : {"4", "short"}) {  // EINTR
    for (int at = 1; at < 60; at += testing::kIsSlow ? 9 : 1) {
      const TempFolder folder;
      const CheckpointRun run = run_in(folder / "c", 1);
      {
        const FaultHere fault(
            {action[0] == '4' ? "write,fsync" : "write", below(folder, "c/step_"), at, action});
        train_saving(run);
      }
      const CheckpointResult next = train_saving(run_in(folder / "c", 3));
      EXPECT_EQ(next.first_step, 1);
      ASSERT_EQ(next.values, expected) << action << " " << at;
    }
  }
}

TEST(CheckpointFaults, AFullDiskOfOneRankOrAllStopsTheSaveOnEveryRank) {
  const std::vector<float> expected = trained(4);
  for (const char* files : {"c/step_", "-00001-of-"}) {
    for (const bool async : {false, true}) {
      int num_full = 0;
      for (int nbytes = 0; nbytes < 8000; nbytes += async || testing::kIsSlow ? 911 : 311) {
        const TempFolder folder;
        train_saving(run_in(folder / "c", 1));
        CheckpointRun run = run_in(folder / "c", 3, async);
        run.goes_on = true;
        std::vector<CheckpointResult> results;
        {
          const std::string part = files[0] == 'c' ? below(folder, files) : files;
          const FaultHere fault({"bytes", part, nbytes, std::to_string(ENOSPC)});
          results = train_saving_all(run);
        }
        EXPECT_EQ(results[0].errors, results[1].errors);
        for (const std::string& error : results[0].errors) {
          ++num_full;
          EXPECT_TRUE(has(error, {"No space left on device", "step_", "(rank"}));
          if (files[0] == 'c') continue;
          EXPECT_TRUE(has(error, {"(rank 1)", "-00001-of-00002"}));
        }
        EXPECT_LE(steps_in(folder / "c").size() + results[0].errors.size(), 3u);
        const CheckpointResult next = train_saving(run_in(folder / "c", 4));
        ASSERT_EQ(next.values, expected) << nbytes;
        EXPECT_EQ(next.warnings, std::vector<std::string>());
        EXPECT_EQ(steps_in(folder / "c").front(), 4);
      }
      EXPECT_GE(num_full, 3) << files;
    }
  }
}

TEST(CheckpointFaults, ANameThatMayNotLastIsTakenBack) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 1);
  run.goes_on = true;
  {
    const std::vector<std::string> calls = calls_of("fsync", "c", 1);
    const auto at = std::ranges::find(calls, "fsync c") - calls.begin();
    ASSERT_LT(at, std::ssize(calls));
    const FaultHere fault({"fsync", below(folder, "c"), static_cast<int>(at) + 1, "5"});
    const CheckpointResult result = train_saving(run);
    ASSERT_EQ(result.errors.size(), 1u);
    EXPECT_TRUE(has(result.errors[0], {"flush the folder", "Input/output error", "(rank 0)"}));
  }
  EXPECT_EQ(steps_in(folder / "c"), Steps{});
  EXPECT_EQ(names_in(folder / "c"), (Names{".lock"}));
  EXPECT_EQ(train_saving(run).first_step, 0);
  EXPECT_EQ(steps_in(folder / "c"), Steps{1});
}

TEST(CheckpointFaults, LatestDoesNotMatter) {
  for (const char* text : {"", "step_7\n", "step_1\r\n", "garbage", "folder", "none"}) {
    const TempFolder folder;
    CheckpointRun run = run_in(folder / "c", 2);
    train_saving(run);
    fs::remove(folder / "c/latest");
    if (std::string(text) == "folder") {
      fs::create_directories(folder / "c/latest/x");
    } else if (std::string(text) != "none") {
      folder.write("c/latest", text);
    }
    run.training.steps = 3;
    const CheckpointResult result = train_saving(run);
    EXPECT_EQ(result.first_step, 2);
    EXPECT_EQ(steps_in(folder / "c"), (Steps{3, 2, 1})) << text;
    if (std::string(text) == "folder") {
      ASSERT_EQ(result.warnings.size(), 1u);
      EXPECT_TRUE(has(result.warnings[0], {"latest", "a folder"}));
    } else {
      EXPECT_EQ(result.warnings, std::vector<std::string>());
      EXPECT_EQ(folder.read("c/latest"), "step_3\n");
    }
  }
}

TEST(CheckpointFaults, WhatCannotBeRemovedIsWarnedOf) {
  {  // and all of it, in lines of which the later ones are indented
    const TempFolder folder;
    CheckpointRun run = run_in(folder / "c", 3);
    train_saving(run);
    fs::remove(folder / "c/latest");
    fs::create_directories(folder / "c/latest/x");
    run.training.steps = 5;
    run.checkpoints.keep = 1;
    run.behind_step = [&](const testing::CheckpointRank& rank, int step) {
      if (rank.world.rank() == 0 && step == 3) {  // in the place of what step 4 is renamed to
        fs::create_directories(folder / "c/step_4.removed-0/x");
      }
      return true;
    };
    const CheckpointResult result = train_saving(run);
    ASSERT_EQ(result.warnings.size(), 2u);
    EXPECT_TRUE(has(result.warnings[1],
                    {"latest", "\n  [checkpoint] expected to remove an old one", "step_4"}));
  }
  for (const char* calls : {"rename", "unlink", "rmdir"}) {
    const TempFolder folder;
    CheckpointRun run = run_in(folder / "c", 1);
    train_saving(run);
    run.training.steps = 3;
    run.checkpoints.keep = 1;
    const std::vector<float> expected = trained(3);
    {
      const FaultHere fault({calls, below(folder, "c/step_1"), 1, std::to_string(EACCES)});
      const CheckpointResult result = train_saving(run);
      ASSERT_EQ(result.warnings.size(), 1u) << calls;
      EXPECT_TRUE(has(result.warnings[0], {"remove an old one", "Permission denied", "step_1"}));
      EXPECT_EQ(result.values, expected);
    }
    EXPECT_EQ(steps_in(folder / "c"), Steps{3}) << calls;
    EXPECT_EQ(train_saving(run).first_step, 3);
    EXPECT_EQ(names_in(folder / "c"), (Names{".lock", "latest", "step_3"})) << calls;
  }
}

TEST(CheckpointFaults, AFolderThatCannotBeReadIsNotAnEmptyOne) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 1);
  train_saving(run);
  // The second time: the first removes what died.
  const FaultHere fault({"opendir", below(folder, "c"), 2, std::to_string(EACCES)});
  EXPECT_TRUE(has(error_of<IoError>([&] { train_saving(run); }),
                  {"expected a folder that can be read, got Permission denied"}));
}

TEST(CheckpointFaults, LinksAreNotFollowedWhereSomethingIsRemoved) {
  const TempFolder folder, others;
  others.write("precious", "x");
  for (const char* name : {"step_1.tmp-0", "step_2.removed-0", "step_1"}) {
    fs::create_directories(folder / "c");
    fs::create_directory_symlink(others.path(), folder / (std::string("c/") + name));
  }
  CheckpointRun run = run_in(folder / "c", 2);
  run.resumes = false;
  EXPECT_THROW(train_saving(run), engine::InvalidArgument);  // has a checkpoint, it seems
  EXPECT_EQ(names_in(folder / "c"), (Names{".lock", "step_1"}));
  fs::remove(folder / "c/step_1");
  train_saving(run);
  fs::remove_all(folder / "c/step_1");
  fs::create_directory_symlink(others.path(), folder / "c/step_1");
  run.resumes = true;
  run.checkpoints.keep = 1;
  run.training.steps = 3;
  EXPECT_EQ(train_saving(run).first_step, 2);
  EXPECT_EQ(names_in(folder / "c"), (Names{".lock", "latest", "step_3"}));
  EXPECT_EQ(others.read("precious"), "x");
}

TEST(CheckpointFaults, DamagedOnesAreNotTheNewestThatStay) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 4);
  run.save_every = 2;
  train_saving(run);
  folder.write("c/step_4/manifest.json", "{}");
  run.save_every = 1;
  run.training.steps = 3;
  run.checkpoints.keep = 1;
  const CheckpointResult result = train_saving(run);
  EXPECT_EQ(result.first_step, 2);
  EXPECT_EQ(steps_in(folder / "c"), (Steps{4, 3}));
  run.training.steps = 5;
  EXPECT_EQ(train_saving(run).first_step, 3);
  // 4 was needed.
  EXPECT_EQ(names_in(folder / "c"), (Names{".lock", "latest", "step_4.damaged-0", "step_5"}));
  EXPECT_EQ(train_saving(run).first_step, 5);
}

TEST(CheckpointFaults, NothingIsLeftOpenOrRunning) {
  const auto count = [](const char* what) {
    return std::distance(fs::directory_iterator(what), {});
  };
  const TempFolder folder;
  train_saving(run_in(folder / "c", 1));
  const auto fds = count("/proc/self/fd"), threads = count("/proc/self/task");
  CheckpointRun run = run_in(folder / "c", 3, true);
  for (const char* calls : {"write", "fsync", "create", "rename", "mkdir"}) {
    for (const bool goes_on : {false, true}) {
      const FaultHere fault({calls, below(folder, "c/step_"), 1, "5"});
      run.goes_on = goes_on;
      try {
        train_saving(run);
        EXPECT_TRUE(goes_on);
      } catch (const IoError&) {
        EXPECT_FALSE(goes_on);
      }
      EXPECT_EQ(count("/proc/self/fd"), fds);
      EXPECT_EQ(count("/proc/self/task"), threads);
      fs::remove_all(folder / "c/step_2");
      fs::remove_all(folder / "c/step_3");
    }
  }
}

TEST(CheckpointFaults, ManyRanksNeedFewOpenFiles) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder / "c", 1);
  run.training.ranks = 12;
  run.training.numel = 900;
  train_saving(run);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = before;
  few.rlim_cur = 96;
  ::setrlimit(RLIMIT_NOFILE, &few);
  EXPECT_EQ(train_saving(run).first_step, 1);
  ::setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace tessera::shard
