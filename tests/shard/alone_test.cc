// A rank that is alone computes its gradient where the sum lies, and adds only what comes behind.
#include <gtest/gtest.h>

#include <vector>

#include "engine/dtype.h"
#include "tests/shard/toy_training.h"
#include "tests/shard/watch.h"

namespace tessera::shard {
namespace {

using testing::Training;
using testing::Watch;

constexpr int kSteps = 3, kUnits = 4;  // three blocks and the root

// What adds gradients to sums, in a step.
int num_sums(Training run) {
  Watch watch;
  run.ranks = 1;
  run.steps = kSteps;
  run.poison = true;
  run.options.listener = &watch;
  testing::train(run);
  EXPECT_EQ(watch.count("reduce") % kSteps, 0);
  return watch.count("reduce") / kSteps;
}

TEST(Alone, TheFirstGradientIsTheSum) {
  for (const char* strategy : {"ddp", "zero3"}) {
    const FsdpOptions options{.placement = Placement::preset(strategy)};
    EXPECT_EQ(num_sums({.options = options}), 0) << strategy;
    EXPECT_EQ(num_sums({.accum = 3, .options = options}), 2 * kUnits) << strategy;
    EXPECT_EQ(num_sums({.accum = 3, .options = options, .no_sync = true}), 0) << strategy;
  }
}

TEST(Alone, WhatIsRoundedOrLiesElsewhereIsCopied) {
  FsdpOptions rounded;
  rounded.precision.reduce = engine::DType::kBF16;
  EXPECT_EQ(num_sums({.options = rounded}), kUnits);
  FsdpOptions accumulated;
  accumulated.precision = {.param = engine::DType::kBF16,
                           .reduce = engine::DType::kBF16,
                           .accumulate = engine::DType::kBF16};
  EXPECT_EQ(num_sums({.options = accumulated}), kUnits);
  FsdpOptions offloaded;
  offloaded.offload.gradients = 0.5;
  EXPECT_EQ(num_sums({.options = offloaded}), kUnits);
}

// The micro-batches of two ranks.
TEST(Alone, HasTheBitsOfRanks) {
  for (const int accum : {1, 2}) {
    Training together{.ranks = 2, .accum = accum, .poison = true, .delay_seed = 3};
    Training alone = together;
    alone.ranks = 1;
    alone.accum = 2 * accum;
    EXPECT_EQ(testing::train(alone), testing::train(together)) << accum;
  }
}

}  // namespace
}  // namespace tessera::shard
