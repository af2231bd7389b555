// A rank that is alone computes its gradient where the sum lies, and adds only what comes after.
#include <gtest/gtest.h>

#include <vector>

#include "engine/dtype.h"
#include "tests/shard/launch_watch.h"
#include "tests/shard/toy_training.h"

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

// The sum of a step that was given up may still be added to when the next one begins.
TEST(Alone, AStepAfterOneThatWasGivenUpStartsFromNothing) {
  const auto train = [](comm::ProcessGroup& world, bool gives_up) {
    const engine::Stream compute = engine::Stream::inline_cpu("compute");
    const engine::Memory memory(compute);
    engine::Tape tape(memory, compute);
    testing::ToyModel model(3, 300);
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
              {.placement = Placement::preset("ddp"), .delay_seed = 5});
    Sgd optimizer(fsdp, {});
    const auto pass = [&] {
      const std::vector<float> ones(300, 1.0f);
      tape.backward(model.loss(tape, engine::Tensor::from<float>(memory, {300}, ones)));
    };
    if (gives_up) {
      fsdp.begin_step(2);
      pass();
      fsdp.next_micro_step();
      pass();
      fsdp.cancel_step();
    }
    fsdp.begin_step();
    pass();
    return fsdp.finish_step().value();
  };
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    EXPECT_EQ(train(world, true), train(world, false));
  });
}

}  // namespace
}  // namespace tessera::shard
