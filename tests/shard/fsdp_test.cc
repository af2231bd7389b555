// Fsdp on a model small enough to follow: the order of collectives as text, slots and memory, the
// same bits for every choice, and errors that name what is wrong.
#include "shard/fsdp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Category;
using engine::Memory;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using testing::CollectiveLog;
using testing::collectives_of_step;
using testing::error_of;
using testing::LoggedGroup;
using testing::ToyModel;
using testing::train;
using testing::Training;

TEST(FsdpOrder, Zero3GathersTwiceAheadOfUseAndKeepsTheLastUnit) {
  const std::vector<std::string> expected = {"all_gather root forward",
                                             "all_gather h.0 forward",
                                             "all_gather h.1 forward",
                                             "all_gather h.2 forward",
                                             "all_gather h.1 backward",
                                             "reduce_scatter h.2 gradient",
                                             "all_gather h.0 backward",
                                             "reduce_scatter h.1 gradient",
                                             "reduce_scatter h.0 gradient",
                                             "reduce_scatter root gradient",
                                             "all_gather norm"};
  for (const bool recompute : {false, true}) {
    EXPECT_EQ(collectives_of_step(0, {.recompute = recompute}), expected);
    EXPECT_EQ(collectives_of_step(2, {.recompute = recompute}), expected);
  }
}

TEST(FsdpOrder, PostBackwardPrefetchGathersAfterTheReduction) {
  EXPECT_EQ(collectives_of_step(
                1, {.blocks = 4,
                    .options = {.prefetch = 2, .backward_prefetch = BackwardPrefetch::kPost}}),
            (std::vector<std::string>{
                "all_gather root forward", "all_gather h.0 forward", "all_gather h.1 forward",
                "all_gather h.2 forward", "all_gather h.3 forward", "reduce_scatter h.3 gradient",
                "all_gather h.2 backward", "all_gather h.1 backward", "reduce_scatter h.2 gradient",
                "all_gather h.0 backward", "reduce_scatter h.1 gradient",
                "reduce_scatter h.0 gradient", "reduce_scatter root gradient", "all_gather norm"}));
  EXPECT_EQ(collectives_of_step(1, {.options = {.backward_prefetch = BackwardPrefetch::kPost}}),
            collectives_of_step(1, {.options = {.prefetch = 0}}));
}

TEST(FsdpOrder, PrefetchZeroGathersOnDemand) {
  EXPECT_EQ(collectives_of_step(1, {.options = {.prefetch = 0}}),
            (std::vector<std::string>{
                "all_gather root forward", "all_gather h.0 forward", "all_gather h.1 forward",
                "all_gather h.2 forward", "reduce_scatter h.2 gradient", "all_gather h.1 backward",
                "reduce_scatter h.1 gradient", "all_gather h.0 backward",
                "reduce_scatter h.0 gradient", "reduce_scatter root gradient", "all_gather norm"}));
}

TEST(FsdpOrder, ShardGradOpGathersOnce) {
  EXPECT_EQ(
      collectives_of_step(1, {.options = {.placement = Placement::preset("shard_grad_op")}}),
      (std::vector<std::string>{
          "all_gather root forward", "all_gather h.0 forward", "all_gather h.1 forward",
          "all_gather h.2 forward", "reduce_scatter h.2 gradient", "reduce_scatter h.1 gradient",
          "reduce_scatter h.0 gradient", "reduce_scatter root gradient", "all_gather norm"}));
}

TEST(FsdpOrder, DdpOnlyReduces) {
  EXPECT_EQ(collectives_of_step(1, {.options = {.placement = Placement::preset("ddp")}}),
            (std::vector<std::string>{"all_reduce h.2 gradient", "all_reduce h.1 gradient",
                                      "all_reduce h.0 gradient", "all_reduce root gradient"}));
}

TEST(FsdpOrder, PackedBlocksAreOneUnit) {
  EXPECT_EQ(
      collectives_of_step(1, {.blocks = 4, .options = {.unit_min_numel = 1000}}),
      (std::vector<std::string>{
          "all_gather root forward", "all_gather h.0..h.1 forward", "all_gather h.2..h.3 forward",
          "all_gather h.0..h.1 backward", "reduce_scatter h.2..h.3 gradient",
          "reduce_scatter h.0..h.1 gradient", "reduce_scatter root gradient", "all_gather norm"}));
}

// The reference: one process, the same micro-batches in the same order, everything resident.
class FsdpBits : public ::testing::TestWithParam<int> {};

TEST_P(FsdpBits, EveryStrategyEqualsOneProcess) {
  const int micro_batches = GetParam();
  for (const bool adamw : {false, true}) {
    const Training base{.adamw = adamw, .max_norm = 5};
    Training reference = base;
    reference.ranks = 1;
    reference.accum = micro_batches;
    reference.options.placement = Placement::preset("ddp");
    const std::vector<float> expected = train(reference);
    for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
      for (int ranks = 1; ranks <= micro_batches; ++ranks) {
        if (micro_batches % ranks != 0) continue;
        Training run = base;
        run.ranks = ranks;
        run.accum = micro_batches / ranks;
        run.options.placement = Placement::preset(strategy);
        for (const int prefetch : {0, 1, 2}) {
          run.options.prefetch = prefetch;
          run.recompute = prefetch == 1;
          run.options.unit_min_numel = prefetch == 2 ? 1000 : 0;
          EXPECT_EQ(train(run), expected)
              << strategy << " ranks " << ranks << " prefetch " << prefetch;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(MicroBatches, FsdpBits, ::testing::Values(1, 2, 3, 4, 6));

TEST(FsdpBits, PoisonAndDelaysChangeNoBit) {
  Training run{.ranks = 3, .accum = 2, .adamw = true, .max_norm = 5};
  const std::vector<float> expected = train(run);
  for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
    for (const int prefetch : {0, 1, 2}) {
      run.options.placement = Placement::preset(strategy);
      run.options.prefetch = prefetch;
      run.poison = true;
      run.delay_seed = 17 + static_cast<std::uint64_t>(prefetch);
      EXPECT_EQ(train(run), expected) << strategy << " prefetch " << prefetch;
    }
  }
}

TEST(FsdpBits, ManySeedsOfDelaysChangeNoBit) {
  const Training run{.ranks = 3, .steps = 2, .blocks = 2, .numel = 20, .max_norm = 5};
  const std::vector<float> expected = train(run);
  std::vector<std::uint64_t> seeds(testing::at_most_if_slow(20, 200));
  std::iota(seeds.begin(), seeds.end(), 1);
  const auto values = testing::concurrently(seeds, [&](std::uint64_t seed) {
    Training late = run;
    late.delay_seed = seed;
    return train(late);
  });
  for (std::size_t i = 0; i < seeds.size(); ++i) ASSERT_EQ(values[i], expected) << seeds[i];
}

TEST(FsdpBits, CommunicatingOnlyAtTheLastMicroStepEqualsItselfAcrossStrategies) {
  Training run{.ranks = 3, .accum = 2};
  run.no_sync = true;
  const std::vector<float> expected = train(run);
  for (const char* strategy : {"shard_grad_op", "ddp"}) {
    run.options.placement = Placement::preset(strategy);
    EXPECT_EQ(train(run), expected) << strategy;
  }
}

TEST(FsdpBits, RoundingIsTheSameForOneRankAndMany) {
  for (const Precision& precision :
       {Precision{.param = engine::DType::kBF16}, Precision{.reduce = engine::DType::kBF16},
        Precision{.param = engine::DType::kBF16, .reduce = engine::DType::kBF16},
        Precision{.accumulate = engine::DType::kBF16}}) {
    Training run{.ranks = 1, .accum = 6};
    run.options.precision = precision;
    const std::vector<float> expected = train(run);
    EXPECT_NE(expected, train({.ranks = 1, .accum = 6})) << "rounding must show";
    for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
      for (const int ranks : {2, 3}) {
        run.ranks = ranks;
        run.accum = 6 / ranks;
        run.options.placement = Placement::preset(strategy);
        EXPECT_EQ(train(run), expected) << strategy << " ranks " << ranks;
      }
    }
  }
}

// The staging of the wire is as large as the largest gradient, which may be the root's.
TEST(FsdpBits, ARootLargerThanAllBlocksIsRoundedToo) {
  Training run{.accum = 3, .blocks = 0};
  const std::vector<float> exact = train(run);
  run.options.precision.reduce = engine::DType::kBF16;
  const std::vector<float> expected = train(run);
  EXPECT_NE(expected, exact);
  run.ranks = 1;
  run.accum = 6;
  EXPECT_EQ(train(run), expected);
}

TEST(FsdpUse, FrozenParametersAreGatheredAndNotReduced) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    const Memory memory({.poison = true});
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    ToyModel model(2, 300);
    model.layers[0]->weight.trainable = false;
    model.layers[1]->weight.trainable = model.layers[1]->bias.trainable = false;
    CollectiveLog log;
    LoggedGroup group(world, log);
    Fsdp fsdp(group, memory, compute, model.blocks(), &model.root, {});
    const std::vector<float> before = fsdp.full_parameter(model.layers[0]->weight);
    const std::vector<float> bias = fsdp.full_parameter(model.layers[0]->bias);
    AdamW optimizer(fsdp, {});
    log.take();
    fsdp.begin_step();
    tape.backward(
        model.loss(tape, Tensor::from<float>(memory, {300}, std::vector<float>(300, 1.0f))));
    fsdp.finish_step();
    int num_reductions = 0;
    for (const std::string& line : log.take()) num_reductions += line.starts_with("reduce");
    EXPECT_EQ(num_reductions, 2);  // h.0 and root
    optimizer.step(0.1);
    EXPECT_EQ(fsdp.full_parameter(model.layers[0]->weight), before);
    EXPECT_NE(fsdp.full_parameter(model.layers[0]->bias), bias);
  });
}

TEST(FsdpErrors, NameWhatIsWrong) {
  auto wrap = [](const std::function<void(ToyModel&, FsdpOptions&, int)>& spoil, int ranks) {
    return error_of<engine::Error>([&] {
      comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
        const Memory memory;
        const Stream compute = Stream::inline_cpu("compute");
        ToyModel model(2, 10);
        FsdpOptions options;
        spoil(model, options, world.rank());
        const Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
      });
    });
  };
  const auto shared = wrap([](ToyModel& m, FsdpOptions&,
                              int) { m.layers[1]->block.parameters.push_back(&m.layers[0]->bias); },
                           1);
  EXPECT_NE(shared.find("h.0.bias"), std::string::npos) << shared;
  EXPECT_NE(shared.find("h.1"), std::string::npos) << shared;
  const auto twice =
      wrap([](ToyModel& m, FsdpOptions&, int) { m.layers[1]->bias.name = "h.0.bias"; }, 1);
  EXPECT_NE(twice.find("h.0.bias"), std::string::npos) << twice;
  const auto prefetch = wrap([](ToyModel&, FsdpOptions& o, int) { o.prefetch = -1; }, 1);
  EXPECT_NE(prefetch.find("-1"), std::string::npos) << prefetch;
  const auto differ = wrap(
      [](ToyModel& m, FsdpOptions&, int rank) {
        if (rank == 2) m.layers[1]->weight.shape = {11};
      },
      3);
  EXPECT_NE(differ.find("rank 2"), std::string::npos) << differ;
  EXPECT_NE(differ.find("h.1"), std::string::npos) << differ;
}

// Elements 0, 150 and 299 of a parameter of 300 lie on the first, the middle and the last rank.
TEST(FsdpErrors, NonFiniteGradientNamesTheParameterOnEveryRankWhereverItLies) {
  for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      for (const std::size_t element : {0, 150, 299}) {
        std::mutex mutex;
        std::vector<std::string> messages;
        comm::run_ranks(3, {}, [&](ProcessGroup& world) {
          const Memory memory;
          const Stream compute = Stream::inline_cpu("compute");
          Tape tape(memory, compute);
          ToyModel model(2, 300);
          Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
                    {.placement = Placement::preset(strategy)});
          // The only gradient that reads it is the scale's.
          std::vector<float> bias(300, 0.0f);
          bias[element] = bad;
          fsdp.load(model.layers[1]->bias, bias);
          fsdp.parameters_changed();
          fsdp.begin_step();
          tape.backward(model.loss(tape, Tensor::zeros(memory, {300}, engine::DType::kF32)));
          const std::string message = error_of<engine::Error>([&] { fsdp.finish_step(); });
          const std::lock_guard lock(mutex);
          messages.push_back(message);
        });
        EXPECT_EQ(messages, std::vector<std::string>(
                                3, "[fsdp] expected finite gradients, got NaN or infinity (scale)"))
            << strategy << " element " << element << " " << bad;
      }
    }
  }
}

// Each of them would end in other numbers on other ranks, or in collectives that do not match.
TEST(FsdpErrors, WhateverDiffersBetweenRanksIsNamedBeforeTheFirstStep) {
  struct Case {
    std::function<void(ToyModel&, FsdpOptions&)> spoil;
    std::string expected;  // of rank 1's line of the plan
  };
  using engine::DType;
  const std::vector<Case> cases = {
      {[](ToyModel&, FsdpOptions& o) { o.placement = Placement::preset("ddp"); }, "placement "},
      {[](ToyModel&, FsdpOptions& o) { o.prefetch = 2; }, "prefetch 2"},
      {[](ToyModel&, FsdpOptions& o) { o.precision.param = DType::kBF16; }, "param=bf16"},
      {[](ToyModel&, FsdpOptions& o) { o.precision.reduce = DType::kBF16; }, "reduce=bf16"},
      {[](ToyModel&, FsdpOptions& o) { o.precision.accumulate = DType::kBF16; }, "accumulate=bf16"},
      {[](ToyModel&, FsdpOptions& o) { o.reductions_in_flight = 3; }, "reductions_in_flight 3"},
      {[](ToyModel&, FsdpOptions& o) { o.placement.shard_ranks = 1; }, "shard_ranks 1"},
      {[](ToyModel&, FsdpOptions& o) { o.backward_prefetch = BackwardPrefetch::kPost; },
       "post-backward"},
      {[](ToyModel&, FsdpOptions& o) { o.broadcast_buffers = !o.broadcast_buffers; },
       "broadcast_buffers "},
      {[](ToyModel&, FsdpOptions& o) { o.unused_parameters = UnusedParameters::kSkip; },
       "unused_parameters skipped"},
      {[](ToyModel&, FsdpOptions& o) { o.non_finite = NonFinite::kSkip; }, "non_finite skipped"},
      {[](ToyModel&, FsdpOptions& o) { o.check_gradients = true; }, "check_gradients true"},
      {[](ToyModel&, FsdpOptions& o) { o.offload.parameters = 0.25; }, "offload parameters=0.25"},
      {[](ToyModel&, FsdpOptions& o) { o.offload.gradients = 0.25; }, "gradients=0.25"},
      {[](ToyModel&, FsdpOptions& o) { o.offload.optimizer = 0.25; }, "optimizer=0.25"},
      {[](ToyModel&, FsdpOptions& o) { o.mean_ranks = 8; }, "mean over 8 ranks"},
      {[](ToyModel&, FsdpOptions& o) { o.reducer = make_reducer; }, "reducer own"},
      {[](ToyModel&, FsdpOptions& o) { o.seed = 2; }, "seed 2"},
      {[](ToyModel&, FsdpOptions& o) { o.unit_min_numel = 30; }, "unit h.0..h.1"},
      {[](ToyModel& m, FsdpOptions&) { m.layers[1]->weight.init = engine::Init::normal(2); },
       "h.1.weight (10) at 0, starts as normal 2"},
      {[](ToyModel& m, FsdpOptions&) { m.layers[1]->weight.trainable = false; }, "unit h.1"},
      {[](ToyModel& m, FsdpOptions&) { m.layers[1]->bias.name = "h.1.offset"; }, "h.1.offset"},
      {[](ToyModel& m, FsdpOptions&) {
         m.layers[0]->weight.shape = {2, 5};
       },
       "h.0.weight (2, 5)"},
  };
  for (const Case& c : cases) {
    const std::string error = error_of<engine::InvalidArgument>([&] {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        const Memory memory;
        ToyModel model(2, 10);
        FsdpOptions options;
        if (world.rank() == 1) c.spoil(model, options);
        const Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root,
                        options);
      });
    });
    const std::size_t rank_1 = error.find("rank 1 '");
    EXPECT_NE(rank_1, std::string::npos) << c.expected << ": " << error;
    EXPECT_NE(error.find(c.expected, std::min(rank_1, error.size())), std::string::npos) << error;
  }
}

TEST(FsdpErrors, ParameterReadOutsideItsRegionNamesIt) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    ToyModel model(2, 10);
    const Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, {});
    const std::string message = error_of<engine::Error>([&] { tape.use(model.layers[1]->weight); });
    EXPECT_NE(message.find("h.1.weight"), std::string::npos) << message;
  });
}

}  // namespace
}  // namespace tessera::shard
