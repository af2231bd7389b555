// Which blocks are one unit, and what that changes: the number of reductions, and no bit.
#include "shard/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using engine::DType;
using testing::collectives_of_step;
using testing::error_of;
using testing::has;
using testing::ToyModel;
using testing::train;
using testing::Training;
using Sizes = std::vector<std::int64_t>;
using Packs = std::vector<std::size_t>;
using Lines = std::vector<std::string>;

const std::vector<std::string> kWholeParameters = {"ddp", "zero1", "zero2", "hybrid_zero2"};

// All of one limit.
Packs packs_to(std::int64_t limit, const Sizes& sizes) {
  return pack(sizes, {.first = limit, .other = limit});
}

TEST(Pack, ClosesAPackThatReachesItsLimit) {
  EXPECT_EQ(packs_to(5, {}), Packs{});
  EXPECT_EQ(packs_to(0, {3, 0, 2}), (Packs{1, 1, 1}));
  EXPECT_EQ(packs_to(1, {3, 2}), (Packs{1, 1}));
  EXPECT_EQ(packs_to(5, {3, 2, 3, 1, 9}), (Packs{2, 3})) << "5 reaches it, 4 does not";
  EXPECT_EQ(packs_to(5, {3, 2, 3}), (Packs{2, 1})) << "what is left";
  EXPECT_EQ(packs_to(5, {0, 0, 5, 0}), (Packs{3, 1})) << "blocks without parameters";
  EXPECT_EQ(packs_to(5, {1, 1}), Packs{2});
}

TEST(Pack, TheFirstHasALimitOfItsOwn) {
  EXPECT_EQ(pack(Sizes(7, 1), {.first = 1, .other = 3}), (Packs{1, 3, 3}));
  EXPECT_EQ(pack(Sizes(7, 1), {.first = 2, .other = 4}), (Packs{2, 4, 1}));
  EXPECT_EQ(pack(Sizes(3, 1), {.first = 0, .other = 4}), (Packs{1, 2}));
}

TEST(Pack, WhatIsTooLargeStandsAlone) {
  const PackLimits limits{.first = 2, .other = 4, .alone = 4};
  EXPECT_EQ(pack(Sizes{5, 5}, limits), (Packs{1, 1}));
  EXPECT_EQ(pack(Sizes{1, 5, 1, 1, 1, 1}, limits), (Packs{1, 1, 4})) << "never with what is open";
  EXPECT_EQ(pack(Sizes{1, 4, 3, 4, 3, 5}, limits), (Packs{2, 2, 1, 1})) << "4 is not too large";
  EXPECT_EQ(pack(Sizes{3, 3, 5, 0}, limits), (Packs{1, 1, 1, 1}));
}

// Blocks of one parameter each.
struct Blocks {
  explicit Blocks(const Sizes& numels) {
    for (const std::int64_t numel : numels) {
      engine::Parameter& p = parameters.emplace_back();
      p.name = "p";
      p.shape = {numel};
      engine::Block& block = blocks.emplace_back();
      block.name = "block";
      block.parameters = {&p};
      pointers.push_back(&block);
    }
  }
  std::deque<engine::Parameter> parameters;
  std::deque<engine::Block> blocks;
  std::vector<engine::Block*> pointers;
};

TEST(PacksOf, AreCountedInParametersFromTheFrontOrInBytesFromTheEnd) {
  Blocks b({10, 10, 10, 40, 10, 10, 5});
  const auto units = [&](const FsdpOptions& options) { return packs_of(b.pointers, options); };
  EXPECT_EQ(units({}), Packs(7, 1));
  EXPECT_EQ(units({.unit_min_numel = 20}), (Packs{2, 2, 2, 1}));
  // In bytes: 40 40 40 160 40 40 20.
  EXPECT_EQ(units({.bucket_nbytes = 80}), (Packs{1, 2, 1, 3}))
      << "the default of the first bucket is larger, and capped";
  EXPECT_EQ(units({.bucket_nbytes = 40}), (Packs{1, 1, 1, 1, 1, 2})) << "here, too";
  EXPECT_EQ(units({.bucket_nbytes = 80, .first_bucket_nbytes = 0}), (Packs{1, 2, 1, 2, 1}));
  EXPECT_EQ(units({.bucket_nbytes = 80, .first_bucket_nbytes = 60}), (Packs{1, 2, 1, 1, 2}));
  EXPECT_EQ(units({.bucket_nbytes = 160, .first_bucket_nbytes = 60}), (Packs{3, 2, 2}));
  EXPECT_EQ(units({.bucket_nbytes = 1}), Packs(7, 1));
  EXPECT_EQ(units({.bucket_nbytes = 1 << 25}), Packs{7});
  // Half as many bytes for each.
  EXPECT_EQ(units({.bucket_nbytes = 40, .precision = {.reduce = DType::kBF16}}),
            (Packs{1, 2, 1, 3}));
  EXPECT_EQ(units({.bucket_nbytes = 80, .precision = {.accumulate = DType::kBF16}}),
            (Packs{1, 2, 1, 3}))
      << "it is the bytes on the wire that count";
  // What is frozen has no gradient: 40 0 0 160 0 40 20.
  for (const std::size_t frozen : {1, 2, 4}) b.parameters[frozen].trainable = false;
  EXPECT_EQ(units({.bucket_nbytes = 60, .first_bucket_nbytes = 1}), (Packs{3, 1, 2, 1}));
  EXPECT_EQ(units({.unit_min_numel = 20}), (Packs{2, 2, 2, 1}));
  // What is ignored is in no unit: 10 10 10 0 10 10 5, and in bytes 40 0 0 0 0 40 20.
  const auto ignores = [&](const engine::Parameter& p) { return &p == &b.parameters[3]; };
  EXPECT_EQ(units({.unit_min_numel = 20, .ignores = ignores}), (Packs{2, 3, 2}));
  EXPECT_EQ(units({.bucket_nbytes = 60, .first_bucket_nbytes = 1, .ignores = ignores}),
            (Packs{6, 1}));
}

// Eight blocks of 2400 bytes each, and a root of 1200.
FsdpOptions bucketed(const std::string& strategy, std::int64_t nbytes, std::int64_t first = 0) {
  return {.placement = Placement::preset(strategy),
          .bucket_nbytes = nbytes,
          .first_bucket_nbytes = first};
}

TEST(Buckets, AreReducedFromTheSmallOneAtTheEndOn) {
  EXPECT_EQ(collectives_of_step(1, {.blocks = 8, .options = bucketed("ddp", 7200, 2400)}),
            (Lines{"all_reduce h.7 gradient", "all_reduce h.4..h.6 gradient",
                   "all_reduce h.1..h.3 gradient", "all_reduce h.0 gradient",
                   "all_reduce root gradient"}));
  EXPECT_EQ(collectives_of_step(1, {.blocks = 8, .options = bucketed("zero2", 9600, 4000)}),
            (Lines{"reduce_scatter h.6..h.7 gradient", "reduce_scatter h.2..h.5 gradient",
                   "reduce_scatter h.0..h.1 gradient", "reduce_scatter root gradient",
                   "all_gather norm"}));
}

TEST(Buckets, DecideHowManyReductionsThereAre) {
  const auto num_reductions = [](const std::string& strategy, std::int64_t nbytes) {
    const Lines lines = collectives_of_step(
        1, {.ranks = 4, .blocks = 8, .options = bucketed(strategy, nbytes, nbytes)});
    return std::ranges::count_if(lines, [](std::string_view line) {
      return line.ends_with("gradient") && !line.starts_with("broadcast");
    });
  };
  for (const std::string& strategy : kWholeParameters) {
    for (const auto& [nbytes, num_blocks] :
         {std::pair{0, 1}, {1, 1}, {2400, 1}, {2401, 2}, {4800, 2}, {9600, 4}, {1 << 20, 8}}) {
      EXPECT_EQ(num_reductions(strategy, nbytes), 8 / num_blocks + 1) << strategy << " " << nbytes;
    }
  }
}

TEST(Buckets, ChangeNoBit) {
  for (const int accum : {1, 2}) {
    Training run{.ranks = 4, .accum = accum, .blocks = 5, .adamw = accum == 2, .max_norm = 5};
    run.options.placement = Placement::preset("ddp");
    const std::vector<float> expected = train(run);
    int turn = 0;
    for (const std::string& strategy : kWholeParameters) {
      for (const std::int64_t nbytes : {0, 1, 2401, 7200, 1 << 20}) {
        run.options = bucketed(strategy, nbytes, nbytes / 2);
        run.options.reductions_in_flight = turn % 3;
        run.options.unused_parameters =
            turn / 2 % 2 == 0 ? UnusedParameters::kZero : UnusedParameters::kSkip;
        run.recompute = turn / 3 % 2 == 1;
        run.poison = turn % 2 == 0;
        run.delay_seed = turn % 4 == 0 ? 1 + static_cast<std::uint64_t>(turn) : 0;
        ++turn;
        EXPECT_EQ(train(run), expected) << strategy << " " << nbytes;
      }
    }
  }
}

std::string error_with(const std::function<void(FsdpOptions&, int rank)>& choose) {
  return error_of<engine::InvalidArgument>([&] {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      const engine::Memory memory;
      ToyModel model(2, 10);
      FsdpOptions options = bucketed("ddp", 1000, 500);
      choose(options, world.rank());
      const Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), model.blocks(),
                      &model.root, options);
    });
  });
}

TEST(Buckets, ThatContradictAreRefusedWithTheirValues) {
  for (const char* strategy : {"zero3", "shard_grad_op", "hsdp", "hfsdp"}) {
    EXPECT_TRUE(has(error_with([&](FsdpOptions& o, int) { o = bucketed(strategy, 1000); }),
                    {"bucket_nbytes", "got 1000", "parameters=shard", "unit_min_numel"}))
        << strategy;
  }
  EXPECT_TRUE(has(error_with([](FsdpOptions& o, int) { o.unit_min_numel = 7; }),
                  {"bucket_nbytes or unit_min_numel", "got 1000 and 7"}));
  EXPECT_TRUE(has(error_with([](FsdpOptions& o, int) { o.bucket_nbytes = -3; }),
                  {"bucket_nbytes", "at least 0", "got -3"}));
  EXPECT_TRUE(has(error_with([](FsdpOptions& o, int) { o.first_bucket_nbytes = -4; }),
                  {"first_bucket_nbytes", "at least 0", "got -4"}));
  EXPECT_TRUE(has(error_with([](FsdpOptions& o, int) { o.bucket_nbytes = 0; }),
                  {"bucket_nbytes with first_bucket_nbytes", "got 0 and 500"}));
}

TEST(Buckets, ThatDifferBetweenRanksAreNamed) {
  EXPECT_TRUE(has(error_with([](FsdpOptions& o, int rank) { o.bucket_nbytes += rank; }),
                  {"rank 0 'buckets of 1000 bytes, the first of 500'",
                   "rank 1 'buckets of 1001 bytes, the first of 500'"}));
  EXPECT_TRUE(has(error_with([](FsdpOptions& o, int rank) { o.first_bucket_nbytes += rank; }),
                  {"rank 1 'buckets of 1000 bytes, the first of 501'"}));
  EXPECT_TRUE(has(error_with([](FsdpOptions& o, int rank) {
                    if (rank > 0) return;
                    o.bucket_nbytes = 0;
                    o.first_bucket_nbytes = FsdpOptions{}.first_bucket_nbytes;
                  }),
                  {"rank 0 'buckets off'"}));
}

}  // namespace
}  // namespace tessera::shard
