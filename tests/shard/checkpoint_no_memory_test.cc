// Saves in which one allocation finds no memory, or all from there on, whichever it is: all ranks
// end soon with an error, older checkpoints load, and the next save works.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "shard/checkpoint/agreement.h"
#include "shard/checkpoint/folder.h"
#include "tests/shard/checkpoint_run.h"
#include "tests/testing/errors.h"
#include "tests/testing/failing_new.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using testing::CheckpointRank;
using testing::CheckpointRun;
using testing::fail_new_after;
using testing::Fails;
using testing::has;
using testing::never_fail_new;
using testing::num_news;
using testing::TempFolder;

namespace fs = std::filesystem;

using Names = std::set<std::string>;
using Steps = std::vector<std::int64_t>;

constexpr int kRanks = 2;
constexpr auto kPatient = std::chrono::hours(1);  // waiting for it fails the test
constexpr std::int64_t kNone = std::int64_t{1} << 60;

CheckpointRun run_in(const std::string& folder, bool async) {
  ::setenv("TESSERA_NO_FLUSH", "1", 1);
  CheckpointRun run{
      .training = {.ranks = kRanks, .steps = 2, .blocks = 1, .numel = 40, .adamw = true},
      .checkpoints = {.folder = folder, .keep = 1, .async = async},
      .save_every = 0};
  run.training.options.placement = Placement::preset("zero3");
  return run;
}

struct Trained {
  int first_step = 0;
  std::vector<float> values;
  std::vector<std::string> warnings;
};

Trained train(const CheckpointRun& run) {
  Trained trained;
  comm::run_ranks(kRanks, {.deadline = kPatient}, [&](comm::ProcessGroup& world) {
    const auto result = testing::train_saving_rank(world, run);
    if (world.rank() == 0) trained = {result.first_step, result.values, result.warnings};
  });
  return trained;
}

// Whole or not.
Names checkpoints_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) names.insert(entry.path().filename().string());
  }
  return names;
}

void save_and_wait(Checkpointer& checkpointer, std::int64_t step) {
  checkpointer.save(step, {{"key", "a value of some length, for which memory is needed"}});
  checkpointer.poll();
  checkpointer.wait();
}

// A save in which memory fails; returns what this rank was told, if it goes on. Throws what ends
// it.
class Attempt {
 public:
  Attempt(std::int64_t num_good, Fails fails) : num_good_(num_good), fails_(fails) {}

  std::string run(const CheckpointRank& rank, std::int64_t step) {
    begin_.arrive_and_wait();
    if (rank.world.rank() == 0) {
      first_ = num_news();
      fail_new_after(num_good_, fails_);
    }
    begin_.arrive_and_wait();
    std::exception_ptr error;
    try {
      save_and_wait(rank.checkpointer, step);
    } catch (const engine::CommError&) {
      end_.arrive_and_drop();
      throw;
    } catch (const engine::Error&) {
      error = std::current_exception();
    } catch (...) {  // bad_alloc: the others are told when this rank leaves
      end_.arrive_and_drop();
      throw;
    }
    end_.arrive_and_wait();
    if (!error) return "";
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      return e.what();
    }
  }
  /// Of all ranks.
  std::int64_t num_allocations() const { return last_ - first_; }

 private:
  std::int64_t num_good_, first_ = 0, last_ = 0;
  Fails fails_;
  std::barrier<> begin_{kRanks};
  struct Stop {
    Attempt* attempt;
    void operator()() const noexcept {
      attempt->last_ = num_news();
      never_fail_new();
    }
  };
  std::barrier<Stop> end_{kRanks, Stop{this}};
};

// What came of a run that attempts to save step 2 of 2.
enum class End { kSaved, kTold, kEnded, kTerminated };

// The run; it has saved step 1, and saves step 2 again if it was told that this failed.
End attempt(const CheckpointRun& run, Attempt& attempt) {
  CheckpointRun saving = run;
  End end = End::kSaved;
  saving.behind_step = [&](const CheckpointRank& rank, int step) {
    if (step == 0) {
      save_and_wait(rank.checkpointer, 1);
      return true;
    }
    const std::string told = attempt.run(rank, 2);
    EXPECT_FALSE(rank.checkpointer.is_saving());
    rank.world.barrier("attempt");
    if (told.empty()) return true;
    if (rank.world.rank() == 0) {
      end = End::kTold;
      EXPECT_EQ(checkpoints_in(run.checkpoints.folder), Names{"step_1"});
    }
    EXPECT_TRUE(
        has(told, {"expected memory from the system, got none (checkpoint of step 2) (rank "}));
    save_and_wait(rank.checkpointer, 2);
    return true;
  };
  try {
    const Trained trained = train(saving);
    // What follows a save may be missing, aloud.
    EXPECT_TRUE(steps_in(run.checkpoints.folder) == Steps{2} || trained.warnings.size() == 1u);
    for (const std::string& warning : trained.warnings) {
      EXPECT_TRUE(has(warning, {"expected memory to replace `latest` and remove old ones"}));
    }
  } catch (const std::bad_alloc&) {
    end = End::kEnded;
  } catch (const engine::CommError&) {  // of a rank that had memory to say what it missed
    end = End::kEnded;
  } catch (const std::exception& e) {
    ADD_FAILURE() << e.what();
  }
  never_fail_new();
  return end;
}

// The same in a process of its own: some libraries know no other way out.
End attempt_elsewhere(const CheckpointRun& run, std::int64_t num_good, Fails fails) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::set_terminate([] { ::_exit(static_cast<int>(End::kTerminated)); });
    ::alarm(60);
    Attempt failing(num_good, fails);
    const End end = attempt(run, failing);
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 99 : static_cast<int>(end));
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_NE(WEXITSTATUS(status), 99);
  return static_cast<End>(WEXITSTATUS(status));
}

TEST(CheckpointNoMemory, AnErrorForWhichThereIsNoMemoryIsReportedAsThat) {
  const engine::IoError full(
      "[file] expected to write 4096 bytes, got No space left on device (f)");
  const auto report = [&](bool memory) {
    return report_of([&]() -> std::string {
      if (!memory) fail_new_after(0, Fails::kAll);
      throw full;
    });
  };
  const Report told = report(true), untold = report(false);
  never_fail_new();
  EXPECT_EQ(told.kind, Report::Kind::kIo);
  EXPECT_EQ(told.text, full.what());
  EXPECT_EQ(untold.kind, Report::Kind::kDevice);
  EXPECT_EQ(untold.text, "");
}

TEST(CheckpointNoMemory, EveryAllocationOfASaveMayFail) {
  const TempFolder without;
  const std::vector<float> expected = train(run_in(without / "c", false)).values;
  for (const bool async : {false, true}) {
    Attempt none(kNone, Fails::kOne);
    const TempFolder first;
    EXPECT_EQ(attempt(run_in(first / "c", async), none), End::kSaved);
    const std::int64_t all = none.num_allocations();
    EXPECT_GT(all, 1000);
    for (const Fails fails : {Fails::kOne, Fails::kAll}) {
      std::map<End, int> num;
      // Ranks ask for memory in another order each time: some of them are all of them in the end.
      const std::int64_t stride = (fails == Fails::kOne ? 7 : 37) * (testing::kIsSlow ? 13 : 1);
      for (std::int64_t n = 0; n < all; n += stride) {
        const TempFolder folder;
        const CheckpointRun run = run_in(folder / "c", async);
        const End end = attempt_elsewhere(run, n, fails);
        ++num[end];
        const Steps steps = steps_in(folder / "c");
        if (end == End::kSaved || end == End::kTold) {
          EXPECT_EQ(steps.front(), 2);
        } else {
          EXPECT_TRUE(steps == Steps{1} || steps == Steps{2} || steps == (Steps{2, 1}));
        }
        // What has a name is whole: nothing is passed over. What was half written is gone.
        const Trained next = train(run);
        EXPECT_EQ(next.first_step, steps.front());
        EXPECT_EQ(next.values, expected);
        EXPECT_EQ(checkpoints_in(folder / "c").size(), steps.size());
        ASSERT_FALSE(HasFailure()) << "allocation " << n << ", async " << async;
      }
      EXPECT_GT(num[End::kEnded], 5);
      if (fails == Fails::kAll) continue;  // then JSON has no way out, see docs/reliability.md
      EXPECT_GT(num[End::kTold], 10);
      EXPECT_LT(num[End::kTerminated], num[End::kTold] / 5);
    }
  }
}

}  // namespace
}  // namespace tessera::shard
