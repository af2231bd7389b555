// Passes whose losses are sums of some number of terms, such as targets that are not masked: the
// mean is over all terms of all ranks and passes, and not a mean of means.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/meta.h"
#include "comm/threads.h"
#include "engine/meta.h"
#include "shard/fsdp.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/uneven_ranks.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using testing::error_of;
using testing::has;
using testing::kSoon;
using testing::UnevenRank;
using testing::with;

constexpr int kSteps = 3;
// Terms of each pass of a step, in the order of one process: micro-step by micro-step, and rank by
// rank.
constexpr std::array<std::int64_t, 4> kTerms = {2, 0, 1, 3};
constexpr int kPasses = kTerms.size();
constexpr std::int64_t kAllTerms = 6;

float batch(int step, int pass, std::int64_t term) {
  return 0.25f + static_cast<float>(10 * step + 4 * pass + term) / 64;
}

// As all ranks do alike, there are as many forwards and backwards for a pass of fewer terms.
constexpr int kMostTerms = 3;

void run_pass(UnevenRank& trainer, int step, int pass) {
  for (std::int64_t i = 0; i < kMostTerms; ++i) {
    trainer.tape.backward(trainer.loss(batch(step, pass, i)),
                          /*seed=*/i < kTerms.at(pass) ? 1 : 0);
  }
}

enum class Update { kAfter, kClipped, kInBackward };

std::vector<float> trained(const std::string& strategy, int ranks, Update update) {
  std::vector<float> result;
  comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with(strategy));
    const int micro_steps = kPasses / ranks;
    for (int step = 0; step < kSteps; ++step) {
      if (update == Update::kInBackward) trainer.optimizer.step_in_backward(1e-3);
      for (int micro = 0; micro < micro_steps; ++micro) {
        const int pass = micro * ranks + world.rank();
        const MicroStep options{.num_backwards = kMostTerms, .weight = kTerms.at(pass)};
        micro == 0 ? trainer.fsdp.begin_step(micro_steps, options)
                   : trainer.fsdp.next_micro_step(options);
        run_pass(trainer, step, pass);
      }
      const GradNorm norm = trainer.fsdp.finish_step();
      EXPECT_EQ(trainer.fsdp.mean_scale(), 1.0 / kAllTerms);
      trainer.result.push_back(norm.value());
      if (update == Update::kAfter) trainer.optimizer.step(1e-3);
      if (update == Update::kClipped) trainer.optimizer.step(1e-3, norm, /*max_norm=*/5);
    }
    const std::vector<float> mine = trainer.take();
    if (world.rank() == 0) result = mine;
  });
  return result;
}

TEST(Weight, HasTheBitsOfOneProcessWhateverTheRanksAndPasses) {
  for (const Update update : {Update::kAfter, Update::kClipped}) {
    const std::vector<float> expected = trained("ddp", 1, update);
    for (const std::string& strategy : Placement::preset_names()) {
      for (const int ranks : {1, 2, 4}) {
        EXPECT_EQ(trained(strategy, ranks, update), expected) << strategy << " on " << ranks;
      }
    }
  }
}

TEST(Weight, IsKnownToUpdatesDuringBackward) {
  const std::vector<float> expected = trained("ddp", 1, Update::kAfter);
  for (const char* strategy : {"zero3", "ddp", "zero1", "hsdp"}) {
    EXPECT_EQ(trained(strategy, 2, Update::kInBackward), expected) << strategy;
  }
}

// What a process computes whose every pass is one term, of which the usual mean is the right one.
TEST(Weight, GivesTheMeanOverTermsAndNoMeanOfMeans) {
  std::vector<float> expected;
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with("ddp"));
    for (int step = 0; step < kSteps; ++step) {
      bool is_first = true;
      for (int pass = 0; pass < kPasses; ++pass) {
        for (std::int64_t i = 0; i < kTerms.at(pass); ++i) {
          is_first ? trainer.fsdp.begin_step(kAllTerms) : trainer.fsdp.next_micro_step();
          trainer.tape.backward(trainer.loss(batch(step, pass, i)));
          is_first = false;
        }
      }
      const GradNorm norm = trainer.fsdp.finish_step();
      trainer.result.push_back(norm.value());
      trainer.optimizer.step(1e-3);
    }
    expected = trainer.take();
  });
  const std::vector<float> got = trained("zero3", 2, Update::kAfter);
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], 1e-5 * (1 + std::abs(expected[i]))) << i;
  }
}

TEST(Weight, OfNothingGivesNoGradient) {
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with("zero3"));
    const std::vector<float> before = trainer.values();
    trainer.fsdp.begin_step(1, {.weight = 0});
    trainer.tape.backward(trainer.loss(), /*seed=*/0);
    const GradNorm norm = trainer.fsdp.finish_step();
    EXPECT_EQ(norm.value(), 0);
    trainer.optimizer.step(1e-2, norm, /*max_norm=*/1);
    EXPECT_EQ(trainer.values(), before);
  });
}

// Ranks that run out of batches have no terms, either.
TEST(Weight, GoesWithJoin) {
  std::vector<float> alone;
  for (const int ranks : {1, 2}) {
    comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
      UnevenRank trainer(world, with("zero3"));
      const auto step = [&](bool has_batch) {
        trainer.fsdp.join(has_batch ? 1 : 0);
        trainer.fsdp.begin_step(1, {.weight = has_batch ? 3 : 0});
        if (has_batch) trainer.run(1);
        trainer.update();
        EXPECT_EQ(trainer.fsdp.mean_scale(), has_batch && world.size() == 2 ? 1.0 / 6 : 1.0 / 3);
      };
      if (ranks == 2) {
        step(true);
        trainer.fsdp.join(world.rank() == 0 ? 1 : 0);
        trainer.fsdp.begin_step(1, {.weight = world.rank() == 0 ? 3 : 0});
        if (world.rank() == 0) trainer.run(2);
        trainer.update();
        EXPECT_EQ(trainer.fsdp.mean_scale(), 1.0 / 3);
      } else {
        trainer.fsdp.begin_step(2, {.weight = 3});
        trainer.run(1);
        trainer.fsdp.next_micro_step({.weight = 3});
        trainer.run(1);
        trainer.update();
        trainer.fsdp.begin_step(1, {.weight = 3});
        trainer.run(2);
        trainer.update();
      }
      const std::vector<float> mine = trainer.take();
      if (world.rank() != 0) return;
      if (ranks == 1) alone = mine;
      EXPECT_EQ(mine, alone);
    });
  }
}

TEST(Weight, OfAStepThatWasGivenUpIsForgotten) {
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    UnevenRank trainer(world, with("zero3"));
    trainer.fsdp.begin_step(1, {.weight = 5});
    trainer.fsdp.cancel_step();
    trainer.fsdp.begin_step(2);
    trainer.run(1);
    trainer.fsdp.next_micro_step();
    trainer.run(2);
    trainer.update();
    EXPECT_EQ(trainer.fsdp.mean_scale(), 0.25);
    trainer.fsdp.begin_step(1, {.weight = 5});
    trainer.fsdp.cancel_step();
    trainer.fsdp.begin_step(1, {.weight = world.rank()});
    trainer.run(1);
    trainer.update();
    EXPECT_EQ(trainer.fsdp.mean_scale(), 1);
  });
}

std::string error_for(const FsdpOptions& options, const std::vector<MicroStep>& passes) {
  std::string error;
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    UnevenRank trainer(world, options);
    error = error_of<engine::InvalidArgument>([&] {
      trainer.fsdp.begin_step(static_cast<int>(passes.size()), passes[0]);
      for (std::size_t i = 1; i < passes.size(); ++i) trainer.fsdp.next_micro_step(passes[i]);
    });
  });
  return error;
}

// Where nothing arrives: a plan sends and calls what ranks do.
TEST(Weight, OnAMetaDeviceIsAskedForAndNotRead) {
  const auto step = [](ProcessGroup& world, const engine::Stream& compute) {
    testing::ToyRank trainer(world, with("zero3"), {.compute = compute});
    for (int i = 0; i < 2; ++i) {
      trainer.fsdp.begin_step(1, {.weight = 3});
      trainer.tape.backward(trainer.loss());
      static_cast<void>(trainer.fsdp.finish_step());
    }
    return world.traffic();
  };
  comm::Traffic measured;
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    const comm::Traffic of_rank = step(world, engine::Stream::inline_cpu("compute"));
    if (world.rank() == 0) measured = of_rank;
  });
  const auto planned = comm::make_meta_rank(0, 2);
  const auto compute = engine::Stream::meta("compute", engine::DeviceKind::kCpu, {});
  EXPECT_EQ(step(*planned, compute), measured);
}

TEST(Weight, SaysWhatIsWrong) {
  const FsdpOptions zero3 = with("zero3");
  EXPECT_TRUE(has(error_for(zero3, {{.weight = -1}}), {"a weight from 0 to 2^40, got -1"}));
  EXPECT_TRUE(has(error_for(zero3, {{.weight = std::int64_t{1} << 40}}), {"from 0 to 2^40"}));
  EXPECT_TRUE(has(error_for(zero3, {{.weight = 1}, {}}),
                  {"a weight in each micro-step", "got none in micro-step 2 of 2"}));
  EXPECT_TRUE(has(error_for(zero3, {{}, {.weight = 1}}), {"got one in micro-step 2 of 2"}));
  FsdpOptions experts = zero3;
  experts.mean_ranks = 4;
  EXPECT_TRUE(has(error_for(experts, {{.weight = 1}}), {"no weight with mean_ranks, got 4"}));
}

TEST(Weight, OfOneRankAloneIsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  EXPECT_THROW(comm::run_ranks(2, kSoon,
                               [&](ProcessGroup& world) {
                                 UnevenRank trainer(world, with("zero3"));
                                 auto& error = errors[static_cast<std::size_t>(world.rank())];
                                 try {
                                   trainer.fsdp.begin_step(
                                       1, world.rank() == 0 ? MicroStep{.weight = 1} : MicroStep{});
                                   trainer.run(1);
                                   trainer.update();
                                 } catch (const engine::CommError& e) {
                                   error = e.what();
                                   throw;
                                 }
                               }),
               engine::CommError);
  for (const std::string& error : errors) EXPECT_TRUE(has(error, {"weight"})) << error;
}

}  // namespace
}  // namespace tessera::shard
