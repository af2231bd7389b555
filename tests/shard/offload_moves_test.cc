// What offload moves: the bytes on each side, each moved once, ahead of compute and while backward
// goes on.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/launch_watch.h"
#include "tests/shard/toy_rank.h"

namespace tessera::shard {
namespace {

using engine::Category;
using engine::DType;
using testing::ToyRank;

// Blocks whose parts end inside of what a rank owns.
const testing::ToySetup kSetup{.blocks = 4, .numel = 700, .poison = false};

// One of 2 ranks owns 768 elements of each of 4 blocks (700 + 700, each padded to 768), and 384 of
// the root's (700).
TEST(OffloadMoves, MemoryOnBothSidesIsAsComputed) {
  constexpr std::int64_t kOwned = 4 * 768 + 384;
  constexpr std::int64_t kGradientSlots = 4 * (2 * 1536 + 768);
  struct Case {
    OffloadOptions offload;
    std::int64_t parameters, gradients, optimizer;  // elements on the host
    std::int64_t device_staging, host_staging;      // bytes
  };
  const std::vector<Case> cases = {
      {{}, 0, 0, 0, 0, 0},
      {{.parameters = 1, .gradients = 1, .optimizer = 1}, kOwned, kOwned, kOwned, 0, 0},
      // Parts of 768 end at 640 (0.2), 512 (0.4) and 256 (0.7), of 384 at 256, 256 and 128. On the
      // device update [256, 512) and [512, 640) with sums of the host, the latter with masters too.
      {{.parameters = 0.4, .gradients = 0.7, .optimizer = 0.2},
       4 * 256 + 128,
       4 * 512 + 256,
       4 * 128 + 128,
       2 * 4 * (256 + 128),
       0},
      // All is brought to the host, by each thread a half.
      {{.optimizer = 1, .threads = 2}, 0, 0, kOwned, 0, 2 * 2 * 2 * 4 * 384},
      {{.gradients = 1}, 0, kOwned, 0, 2 * 4 * 768, 0},
  };
  for (const Case& c : cases) {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      ToyRank rank(world, {.offload = c.offload}, kSetup);
      AdamW adamw(rank.fsdp, {});
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss(0.25f));
      adamw.step(0.1, rank.fsdp.finish_step(), 1);
      rank.fsdp.synchronize();
      const auto of = [](const engine::MemoryStats& stats, Category category) {
        return stats.peak_nbytes[static_cast<std::size_t>(category)];
      };
      const engine::MemoryStats device = rank.memory.stats();
      const engine::MemoryStats host = rank.fsdp.host_memory().stats();
      const std::int64_t sum_slots = c.gradients == 0 ? 0 : 4 * (768 + 768);
      EXPECT_EQ(of(device, Category::kParameterShard), 4 * (kOwned - c.parameters));
      EXPECT_EQ(of(host, Category::kParameterShard), 4 * c.parameters);
      EXPECT_EQ(of(device, Category::kGradient),
                4 * (kOwned - c.gradients) + kGradientSlots + sum_slots);
      EXPECT_EQ(of(host, Category::kGradient), 4 * c.gradients);
      EXPECT_EQ(of(device, Category::kOptimizer), 2 * 4 * (kOwned - c.optimizer));
      EXPECT_EQ(of(host, Category::kOptimizer), 2 * 4 * c.optimizer);
      EXPECT_EQ(of(device, Category::kWorkspace), c.device_staging);
      EXPECT_EQ(of(host, Category::kWorkspace) - 8, c.host_staging);  // and the norm
    });
  }
}

// Each gather fetches once, each reduction writes its sum, each but the first of a step reads it.
TEST(OffloadMoves, MovesNoByteTwice) {
  static constexpr std::int64_t kOwned = 4 * (4 * 768 + 384);  // bytes
  const auto moved = [](OffloadOptions offload, DType dtype, const auto& check) {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      testing::Watch watch;
      ToyRank rank(world, {.precision = {.param = dtype}, .offload = offload, .listener = &watch},
                   kSetup);
      AdamW adamw(rank.fsdp, {});
      for (int step = 0; step < 2; ++step) {
        rank.fsdp.synchronize();
        watch.clear();
        rank.fsdp.begin_step(3);
        for (int micro = 0; micro < 3; ++micro) {
          if (micro > 0) rank.fsdp.next_micro_step();
          rank.tape.backward(rank.loss(0.25f));
        }
        adamw.step(0.1, rank.fsdp.finish_step(), 1);
      }
      rank.fsdp.synchronize();
      check(watch);
    });
  };
  moved({.parameters = 1, .gradients = 1, .optimizer = 1}, DType::kF32, [](testing::Watch& watch) {
    EXPECT_GT(watch.count("all_gather"), 3 * 4);
    EXPECT_EQ(watch.count("fetch ", "fetch"), watch.count("all_gather", "gather") - 1);  // norm
    EXPECT_EQ(watch.nbytes("store sum"), 3 * kOwned);
    EXPECT_EQ(watch.nbytes("fetch sum"), 2 * kOwned);
    EXPECT_EQ(watch.count("bring"), 0);
    EXPECT_EQ(watch.count("optimizer ", "host"), 5);
  });
  moved({.optimizer = 1, .threads = 2}, DType::kF32, [](testing::Watch& watch) {
    EXPECT_EQ(watch.nbytes("fetch"), 0);
    EXPECT_EQ(watch.nbytes("store sum"), 0);
    EXPECT_EQ(watch.nbytes("bring"), 2 * kOwned);
    EXPECT_EQ(watch.nbytes("bring back"), kOwned);
    EXPECT_EQ(watch.count("optimizer ", "host 1"), 5);
    EXPECT_EQ(watch.count("optimizer ", "host"), 10);
  });
  moved({.parameters = 1, .optimizer = 1, .threads = 2}, DType::kBF16, [](testing::Watch& watch) {
    EXPECT_EQ(watch.count("cast ", "host 1"), 5);
    EXPECT_EQ(watch.count("cast ", "host"), 10);
  });
  moved({.parameters = 1}, DType::kF32, [](testing::Watch& watch) {
    EXPECT_EQ(watch.nbytes("bring"), kOwned);
    EXPECT_EQ(watch.nbytes("bring back"), kOwned);
    EXPECT_EQ(watch.count("optimizer ", "host"), 0);
  });
}

// Whether the parameters of the next block are fetched before this one computes.
TEST(OffloadMoves, PrefetchFetchesAheadOfCompute) {
  for (const int prefetch : {0, 1, 2}) {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      testing::Watch watch;
      ToyRank rank(world, {.prefetch = prefetch, .offload = {.parameters = 1}, .listener = &watch},
                   kSetup);
      for (int step = 0; step < 2; ++step) {
        rank.fsdp.synchronize();
        watch.clear();
        rank.fsdp.begin_step();
        rank.tape.backward(testing::loss_calling(rank.tape, rank.model, 700, [&](std::size_t i) {
          if (step == 0 || i + 1 == rank.model.layers.size()) return;
          const std::string next = "fetch h." + std::to_string(i + 1);
          if (prefetch > 0) {
            EXPECT_TRUE(watch.wait_for(next)) << next;
          } else {
            EXPECT_EQ(watch.count(next), 0) << next;
          }
        }));
        rank.fsdp.finish_step();
      }
    });
  }
}

// The backward of the first block does not end before the host has updated the last block.
TEST(OffloadMoves, TheHostUpdatesWhileBackwardGoesOn) {
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    testing::Watch watch;
    ToyRank rank(world,
                 {.offload = {.parameters = 1, .gradients = 1, .optimizer = 1}, .listener = &watch},
                 {.numel = 40, .poison = false});
    Sgd sgd(rank.fsdp, {.momentum = 0.9});
    sgd.step_in_backward(0.1);
    rank.fsdp.begin_step();
    bool is_early = false;
    rank.tape.backward(testing::loss_with(rank.tape, rank.model,
                                          [&] { is_early = watch.wait_for("optimizer h.2"); }));
    rank.fsdp.finish_step();
    EXPECT_TRUE(is_early);
    EXPECT_EQ(watch.count("optimizer h.2", "host"), 1);
  });
}

}  // namespace
}  // namespace tessera::shard
