// Saves and loads in which one allocation finds no memory, or all from there on, whichever it is:
// all ranks end soon with an error, older checkpoints load, and the next save works.
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
#include <functional>
#include <map>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "shard/checkpoint/agreement.h"
#include "shard/checkpoint/folder.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
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
  ::setenv("TEST_NO_FLUSH", "1", 1);
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

// Memory fails while ranks do something; run() returns what this rank was told, if it goes on, and
// throws what ends it.
class Attempt {
 public:
  Attempt(std::int64_t num_good, Fails fails) : num_good_(num_good), fails_(fails) {}

  std::string run(int rank, const std::function<void()>& fn) {
    begin_.arrive_and_wait();
    if (rank == 0) {
      first_ = num_news();
      fail_new_after(num_good_, fails_);
    }
    begin_.arrive_and_wait();
    std::exception_ptr error;
    try {
      fn();
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

// What came of a run of two steps that attempts something after the second.
enum class End { kDone, kTold, kEnded, kTerminated };

using Behind = std::function<End(const CheckpointRank&, const std::string& folder, Attempt&)>;

End attempt(const CheckpointRun& run, const Behind& behind, Attempt& attempt) {
  CheckpointRun saving = run;
  End end = End::kDone;
  saving.behind_step = [&](const CheckpointRank& rank, int step) {
    if (step == 0) {
      save_and_wait(rank.checkpointer, 1);
      return true;
    }
    const End mine = behind(rank, run.checkpoints.folder, attempt);
    if (rank.world.rank() == 0) end = mine;
    return true;
  };
  try {
    const Trained trained = train(saving);
    // What follows a save may be missing, aloud.
    for (const std::string& warning : trained.warnings) {
      EXPECT_TRUE(has(warning, {"expected memory to replace `latest` and remove old ones"}));
    }
    const Steps steps = steps_in(run.checkpoints.folder);
    EXPECT_TRUE(std::ssize(steps) <= run.checkpoints.keep || trained.warnings.size() == 1);
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

// attempt() in a process of its own: some libraries know no other way out.
End attempt_elsewhere(const CheckpointRun& run, const Behind& behind, std::int64_t num_good,
                      Fails fails) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::set_terminate([] { ::_exit(static_cast<int>(End::kTerminated)); });
    ::alarm(60);
    Attempt failing(num_good, fails);
    const End end = attempt(run, behind, failing);
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 99 : static_cast<int>(end));
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_NE(WEXITSTATUS(status), 99);
  return static_cast<End>(WEXITSTATUS(status));
}

constexpr const char* kTold = "expected memory from the system, got none (checkpoint";

// What was told to fail is tried again.
End save_step_2(const CheckpointRank& rank, const std::string& folder, Attempt& attempt) {
  const std::string told =
      attempt.run(rank.world.rank(), [&] { save_and_wait(rank.checkpointer, 2); });
  EXPECT_FALSE(rank.checkpointer.is_saving());
  if (told.empty()) return End::kDone;
  EXPECT_TRUE(has(told, {kTold, "of step 2) (rank "}));
  if (rank.world.rank() == 0) {
    EXPECT_EQ(checkpoints_in(folder), Names{"step_1"});
  }
  save_and_wait(rank.checkpointer, 2);
  return End::kTold;
}

End load_step_2(const CheckpointRank& rank, const std::string&, Attempt& attempt) {
  save_and_wait(rank.checkpointer, 2);
  std::int64_t step = 0;
  const auto load = [&] { step = rank.checkpointer.load_newest()->step; };
  const std::string told = attempt.run(rank.world.rank(), load);
  if (!told.empty()) {
    EXPECT_TRUE(has(told, {kTold, "(rank "}));
    load();
  }
  EXPECT_EQ(step, 2);
  return told.empty() ? End::kDone : End::kTold;
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

// Lets every so many allocations fail: ranks ask for memory in another order each time, so that
// these are all of them in the end. Calls `check` with what came of each.
void fail_each(const CheckpointRun& run, const Behind& behind, Fails fails,
               const std::function<void(End, const std::string& folder)>& check) {
  Attempt none(kNone, fails);
  const auto in = [&](const TempFolder& folder) {
    CheckpointRun there = run;
    there.checkpoints.folder = folder / "c";
    return there;
  };
  const TempFolder first;
  EXPECT_EQ(attempt(in(first), behind, none), End::kDone);
  const std::int64_t all = none.num_allocations();
  EXPECT_GT(all, 1000);
  std::map<End, int> num;
  const std::int64_t stride = (fails == Fails::kOne ? 11 : 61) * (testing::kIsSlow ? 7 : 1);
  for (std::int64_t n = 0; n < all; n += stride) {
    const TempFolder folder;
    const End end = attempt_elsewhere(in(folder), behind, n, fails);
    ++num[end];
    check(end, folder / "c");
    ASSERT_FALSE(::testing::Test::HasFailure()) << "allocation " << n;
  }
  EXPECT_GT(num[End::kEnded], 0);
  EXPECT_EQ(num[End::kTerminated], 0);
  if (fails == Fails::kOne) {
    EXPECT_GT(num[End::kTold], 3);
  }
}

TEST(CheckpointNoMemory, EveryAllocationOfASaveMayFail) {
  const TempFolder without;
  const std::vector<float> expected = train(run_in(without / "c", false)).values;
  for (const bool async : {false, true}) {
    for (const Fails fails : {Fails::kOne, Fails::kAll}) {
      fail_each(run_in("", async), save_step_2, fails, [&](End end, const std::string& folder) {
        const Steps steps = steps_in(folder);
        const bool has_ended = end == End::kEnded || end == End::kTerminated;
        EXPECT_TRUE(steps == Steps{2} || steps == (Steps{2, 1}) ||
                    (has_ended && steps == Steps{1}));
        // What has a name is whole: nothing is passed over. What was half written is gone.
        const Trained next = train(run_in(folder, async));
        EXPECT_EQ(next.first_step, steps.front());
        EXPECT_EQ(next.values, expected);
        EXPECT_EQ(checkpoints_in(folder).size(), steps.size());
      });
    }
  }
}

TEST(CheckpointNoMemory, EveryAllocationOfALoadMayFailAndNoOlderOneIsTaken) {
  CheckpointRun run = run_in("", false);
  run.checkpoints.keep = 2;
  for (const Fails fails : {Fails::kOne, Fails::kAll}) {
    fail_each(run, load_step_2, fails, [](End, const std::string& folder) {
      EXPECT_EQ(steps_in(folder), (Steps{2, 1}));
    });
  }
}

}  // namespace
}  // namespace tessera::shard
