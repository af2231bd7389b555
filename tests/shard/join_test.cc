// Ranks that run out of batches before others do. What comes out is what one process has that
// accumulates the batches there are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/uneven_ranks.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::kSoon;
using testing::LoggedGroup;
using testing::UnevenRank;
using testing::with;

constexpr int kMicroSteps = 2;

// What each rank has: rank 0 the most, two in a row with the same, the last one ends first.
int num_batches(int rank, int ranks) { return ranks == 1 ? 7 : 7 - (rank + 1) / 2 * 2; }

// The batches of step `step` in the order of one process: micro-step by micro-step, rank by rank.
std::vector<int> batches_of(int step, int ranks) {
  std::vector<int> all;
  for (int i = kMicroSteps * step; i < kMicroSteps * (step + 1); ++i) {
    for (int r = 0; r < ranks; ++r) {
      if (i < num_batches(r, ranks)) all.push_back(100 * r + i);
    }
  }
  return all;
}

std::vector<float> one_process(int ranks) {
  std::vector<float> result;
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with("ddp"));
    for (int step = 0; !batches_of(step, ranks).empty(); ++step) {
      const std::vector<int> batches = batches_of(step, ranks);
      trainer.fsdp.begin_step(static_cast<int>(batches.size()));
      for (const int& batch : batches) {
        if (&batch != batches.data()) trainer.fsdp.next_micro_step();
        trainer.run(batch);
      }
      trainer.update();
    }
    result = trainer.take();
  });
  return result;
}

struct Way {
  int prefetch = 1;
  bool recompute = false;
  std::int64_t unit_min_numel = 0;
  std::int64_t bucket_nbytes = 0;  // where parameters are whole
  UnusedParameters unused = UnusedParameters::kZero;
};

// The parameters that ranks train which join; `lines`: what each rank called, as text.
std::vector<float> joined(const std::string& strategy, int ranks, const Way& way,
                          std::vector<std::vector<std::string>>* lines = nullptr) {
  std::vector<float> result;
  std::vector<std::vector<std::string>> all(static_cast<std::size_t>(ranks));
  comm::run_ranks(ranks, kSoon, [&](ProcessGroup& group) {
    CollectiveLog log;
    LoggedGroup world(group, log);
    FsdpOptions options = with(strategy);
    options.prefetch = way.prefetch;
    options.unit_min_numel = way.unit_min_numel;
    options.unused_parameters = way.unused;
    if (options.placement.parameters == Place::kWhole && way.bucket_nbytes > 0) {
      options.unit_min_numel = 0;
      options.bucket_nbytes = way.bucket_nbytes;
      options.first_bucket_nbytes = 1;
    }
    UnevenRank trainer(world, options);
    const int rank = world.rank(), count = num_batches(rank, ranks);
    int next = 0;
    while (const int n = trainer.fsdp.join(std::min(kMicroSteps, count - next))) {
      for (int micro = 0; micro < n; ++micro) {
        micro == 0 ? trainer.fsdp.begin_step(n) : trainer.fsdp.next_micro_step();
        if (next < count) trainer.run(100 * rank + next++, way.recompute);
      }
      trainer.update();
    }
    EXPECT_EQ(next, count);
    all[static_cast<std::size_t>(rank)] = log.take();
    const std::vector<float> mine = trainer.take();
    if (rank == 0) result = mine;
  });
  if (lines != nullptr) *lines = all;
  return result;
}

TEST(Join, EqualsOneProcessThatHasTheBatchesThereAre) {
  for (const int ranks : {1, 2, 4}) {
    const std::vector<float> expected = one_process(ranks);
    int turn = 0;
    for (const std::string& strategy : Placement::preset_names()) {
      const Way way{.prefetch = turn % 3,
                    .recompute = turn % 2 == 0,
                    .unit_min_numel = turn % 4 == 3 ? 500 : 0,
                    .bucket_nbytes = ranks == 4 ? 2000 : 0,
                    .unused = turn % 5 == 2 ? UnusedParameters::kSkip : UnusedParameters::kZero};
      EXPECT_EQ(joined(strategy, ranks, way), expected) << strategy << " on " << ranks;
      ++turn;
    }
  }
}

// Not only do the numbers agree: a rank that only takes part calls what its peers call.
TEST(Join, RanksWithoutABatchCallWhatTheOthersCall) {
  for (const char* strategy : {"zero3", "shard_grad_op", "ddp", "zero1"}) {
    std::vector<std::vector<std::string>> lines;
    joined(strategy, 2, {}, &lines);
    EXPECT_GT(lines[0].size(), 20u);
    EXPECT_EQ(lines[0], lines[1]) << strategy;
  }
}

TEST(Join, TakesPartInStepsThatReduceOnceAndInBackwardsThatAreSeveral) {
  // Rank 0 has two batches a step, rank 1 has them in the first step alone.
  const auto run = [](int ranks, bool no_sync) {
    std::vector<float> result;
    comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
      UnevenRank trainer(world, with("zero3"));
      for (int step = 0; step < 3; ++step) {
        const bool has_batch = world.rank() == 0 || step == 0;
        EXPECT_EQ(trainer.fsdp.join(has_batch ? 2 : 0), 2);
        for (int micro = 0; micro < 2; ++micro) {
          const MicroStep options{.no_sync = no_sync && micro == 0, .num_backwards = 2};
          micro == 0 ? trainer.fsdp.begin_step(2, options) : trainer.fsdp.next_micro_step(options);
          for (int i = 0; i < 2 && has_batch; ++i) trainer.run(10 * step + 2 * micro + i);
        }
        if (step > 0) {
          EXPECT_EQ(trainer.fsdp.mean_scale(), 0.5);
        }
        trainer.update();
      }
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  for (const bool no_sync : {false, true}) {
    const std::vector<float> both = run(2, no_sync);
    std::vector<float> alone;
    comm::run_ranks(1, {}, [&](ProcessGroup& world) {
      UnevenRank trainer(world, with("ddp"));
      for (int step = 0; step < 3; ++step) {
        // In the first step both ranks have the same two batches: their sum is twice the one.
        trainer.fsdp.begin_step(2, {.no_sync = no_sync, .num_backwards = 2});
        for (int i = 0; i < 2; ++i) trainer.run(10 * step + i);
        trainer.fsdp.next_micro_step({.num_backwards = 2});
        for (int i = 2; i < 4; ++i) trainer.run(10 * step + i);
        trainer.update();
      }
      alone = trainer.take();
    });
    ASSERT_EQ(both.size(), alone.size());
    for (std::size_t i = 0; i < both.size(); ++i) ASSERT_NEAR(both[i], alone[i], 1e-4) << i;
  }
}

TEST(Join, SaysWhatIsWrong) {
  const auto errors = [](auto fn) {
    std::vector<std::string> all(2);
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      UnevenRank trainer(world, with("zero3"));
      all[static_cast<std::size_t>(world.rank())] =
          error_of<engine::InvalidArgument>([&] { fn(trainer, world.rank()); });
    });
    return all;
  };
  for (const std::string& error :
       errors([](UnevenRank&t, int rank) { t.fsdp.join(rank == 0 ? 2 : 0); })) {
    EXPECT_TRUE(has(error, {"expected a batch on every rank until each", "none on rank 1"}));
  }
  for (const std::string& error : errors([](UnevenRank&t, int) { t.fsdp.join(-1); })) {
    EXPECT_TRUE(has(error, {"expected a number of batches, got -1"}));
  }
  for (const std::string& error : errors([](UnevenRank&t, int) {
         t.fsdp.begin_step();
         t.fsdp.join(1);
       })) {
    EXPECT_TRUE(has(error, {"expected join() between steps"}));
  }
  for (const std::string& error : errors([](UnevenRank&t, int) {
         EXPECT_EQ(t.fsdp.join(2), 2);
         t.fsdp.begin_step(1);
       })) {
    EXPECT_TRUE(has(error, {"expected the 2 micro-steps that join() returned, got 1", "(rank "}));
  }
  for (const std::string& error : errors([](UnevenRank&t, int) {
         EXPECT_EQ(t.fsdp.join(0), 0);
         t.fsdp.begin_step(1);
       })) {
    EXPECT_TRUE(has(error, {"expected no step after a join() that returned 0"}));
  }
  for (const std::string& error : errors([](UnevenRank&t, int) {
         EXPECT_EQ(t.fsdp.join(2), 2);
         t.fsdp.begin_step(2);
         t.run(1);
         t.fsdp.next_micro_step();
         t.fsdp.finish_step();
       })) {
    EXPECT_TRUE(has(error, {"expected a backward in micro-step 2 of 2", "got none (rank "}));
  }
}

TEST(Join, RefusesAForwardWhereThereIsNoBatch) {
  std::string error;
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with("zero3"));
    trainer.fsdp.begin_step();
    trainer.run(1);
    trainer.update();
    trainer.fsdp.join(world.rank() == 0 ? 1 : 0);
    trainer.fsdp.begin_step();
    if (world.rank() == 1) {
      error = error_of<engine::InvalidArgument>([&] { trainer.run(2); });
      trainer.tape.clear();
    } else {
      trainer.run(2);
    }
    trainer.update();
  });
  EXPECT_TRUE(has(error, {"expected neither forward nor backward", "'root'"}));
}

// What join() said holds for one step, which may be given up.
TEST(Join, IsForgottenAfterItsStep) {
  for (const bool gives_up : {true, false}) {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      UnevenRank trainer(world, with("zero3"));
      trainer.fsdp.begin_step();
      trainer.run(1);
      trainer.update();
      EXPECT_EQ(trainer.fsdp.join(world.rank() == 0 ? 1 : 0), 1);
      trainer.fsdp.begin_step();
      if (world.rank() == 0) trainer.run(2);
      gives_up ? trainer.fsdp.cancel_step() : trainer.update();
      trainer.fsdp.begin_step(2);
      EXPECT_EQ(trainer.fsdp.mean_scale(), 0.25);
      trainer.run(3);
      trainer.fsdp.next_micro_step();
      trainer.run(4);
      trainer.update();
    });
  }
}

TEST(Join, OfNobodyIsTheEndBeforeTheFirstStepAsWell) {
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with("zero3"));
    EXPECT_EQ(trainer.fsdp.join(0), 0);
  });
}

TEST(Join, RepeatsTheLastMicroStepThatHadABackward) {
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with("zero3"));
    trainer.fsdp.begin_step();
    trainer.run(1);
    trainer.update();
    trainer.fsdp.begin_step();  // and no rank has a backward
    EXPECT_EQ(trainer.fsdp.finish_step().value(), 0);
    EXPECT_EQ(trainer.fsdp.join(world.rank() == 0 ? 1 : 0), 1);
    trainer.fsdp.begin_step();
    if (world.rank() == 0) trainer.run(2);
    EXPECT_GT(trainer.fsdp.finish_step().value(), 0);
  });
}

// Ranks that differ in more than the number of batches: an error on every rank, and no hang.
TEST(Join, NoticesRanksThatDifferInMoreThanBatches) {
  std::vector<std::string> errors(2);
  try {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      UnevenRank trainer(world, with("zero3"));
      const auto step = [&](int rounds) {
        trainer.fsdp.join(world.rank() == 0 || rounds == 1 ? 1 : 0);
        trainer.fsdp.begin_step();
        if (world.rank() == 0 || rounds == 1) trainer.run(1, false, rounds);
        trainer.update();
      };
      try {
        step(1);
        step(2);
      } catch (const engine::CommError& error) {
        errors[static_cast<std::size_t>(world.rank())] = error.what();
        throw;
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const engine::CommError&) {
  }
  for (const std::string& error : errors) EXPECT_TRUE(has(error, {"expected", "h."})) << error;
}

}  // namespace
}  // namespace tessera::shard
