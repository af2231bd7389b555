// Fsdp used in other ways than one forward, one backward: every way gives the bits of plain data
// parallelism, whatever the strategy, prefetch depth and packing. And what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/elementwise.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "shard/reducer.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/patterns.h"
#include "tests/shard/toy_model.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::CollectiveLog;
using tessera::testing::error_of;
using tessera::testing::forward;
using tessera::testing::has;
using tessera::testing::LoggedGroup;
using tessera::testing::PassFn;
using tessera::testing::Pattern;
using tessera::testing::patterns;
using tessera::testing::sum;
using tessera::testing::ToyModel;
using tessera::testing::train_pattern;

constexpr std::int64_t kNumel = testing::kPatternNumel;
using Training = testing::PatternTraining;

class FsdpPatterns : public ::testing::TestWithParam<Pattern> {};

TEST_P(FsdpPatterns, EqualPlainDataParallelism) {
  const Pattern& pattern = GetParam();
  Training reference{.ranks = 1, .accum = 3, .steps = 3, .num_backwards = pattern.num_backwards};
  reference.options.placement = Placement::preset("ddp");
  reference.options.prefetch = 0;
  const std::vector<float> one_process = train_pattern(reference, pattern.run);
  for (const int ranks : {1, 3}) {
    Training run = reference;
    run.ranks = ranks;
    run.accum = 3 / ranks;
    const std::vector<float> expected = train_pattern(run, pattern.run);
    EXPECT_EQ(expected, one_process) << "ranks " << ranks;
    for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
      run.options.placement = Placement::preset(strategy);
      for (const int prefetch : {0, 1, 2}) {
        run.options.prefetch = prefetch;
        for (const std::int64_t unit_min_numel : {0, 500, 100000}) {
          run.options.unit_min_numel = unit_min_numel;
          EXPECT_EQ(train_pattern(run, pattern.run), expected)
              << strategy << " ranks " << ranks << " prefetch " << prefetch << " packing "
              << unit_min_numel;
        }
      }
    }
  }
}

// The schedule must order slots, gathers and reductions by events alone: here the host runs ahead
// of compute, as it does on a device, and every stream of every rank is late at other times.
TEST_P(FsdpPatterns, AsynchronousComputeAndDelaysChangeNoBit) {
  const Pattern& pattern = GetParam();
  Training run{.ranks = 3, .accum = 2, .steps = 2, .num_backwards = pattern.num_backwards};
  run.options.placement = Placement::preset("ddp");
  const std::vector<float> expected = train_pattern(run, pattern.run);
  run.is_async = true;
  struct Choice {
    const char* strategy;
    int prefetch;
    bool poison;  // poisoning a slot waits for its last use as well, and so hides other waits
  };
  for (const auto& [strategy, prefetch, poison] :
       {Choice{"zero3", 0, false}, Choice{"zero3", 1, false}, Choice{"zero3", 1, true},
        Choice{"shard_grad_op", 1, false}, Choice{"ddp", 1, true}}) {
    run.options.placement = Placement::preset(strategy);
    run.options.prefetch = prefetch;
    run.poison = poison;
    EXPECT_EQ(train_pattern(run, pattern.run), expected)
        << strategy << " prefetch " << prefetch << " poison " << poison;
  }
}

INSTANTIATE_TEST_SUITE_P(All, FsdpPatterns, ::testing::ValuesIn(patterns()),
                         [](const auto& info) { return info.param.name; });

// One rank's objects, for what the training loop above does not do.
struct Rank {
  explicit Rank(ProcessGroup& world, const FsdpOptions& options = {}, int num_blocks = 3)
      : model(num_blocks, kNumel),
        fsdp(world, memory, compute, model.blocks(), &model.root, options) {}

  Tensor ones() const {
    return Tensor::from<float>(memory, {kNumel}, std::vector<float>(kNumel, 1.0f));
  }

  Memory memory{{.poison = true}};
  Stream compute = Stream::inline_cpu("compute");
  Tape tape{memory, compute};
  ToyModel model;
  Fsdp fsdp;
};

TEST(FsdpUse, SeveralForwardsBeforeBackwardAddUp) {
  // loss(x) + loss(x) in one backward has twice the gradient of loss(x).
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    const auto norm_of = [&](std::size_t times) {
      rank.fsdp.begin_step();
      std::vector<Tensor> losses;
      while (losses.size() < times) losses.push_back(rank.model.loss(rank.tape, rank.ones()));
      rank.tape.backward(losses);
      return rank.fsdp.finish_step().value();
    };
    const float once = norm_of(1);
    EXPECT_GT(once, 0);
    EXPECT_FLOAT_EQ(norm_of(2), 2 * once);
  });
}

TEST(FsdpUse, EvaluationBetweenStepsChangesNothing) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    const auto evaluate = [&] {
      rank.tape.no_grad([&] { return rank.model.loss(rank.tape, rank.ones()); });
    };
    float norm = 0;
    for (int i = 0; i < 3; ++i) {
      rank.fsdp.begin_step();
      evaluate();
      rank.tape.backward(rank.model.loss(rank.tape, rank.ones()));
      const float next = rank.fsdp.finish_step().value();
      EXPECT_TRUE(i == 0 || next == norm) << next << " " << norm;
      norm = next;
      evaluate();
    }
  });
}

TEST(FsdpOrder, TheNextStepFollowsTheRecordedOrder) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group);
    for (int step = 0; step < 3; ++step) {
      log.take();
      rank.fsdp.begin_step();
      const Tensor loss = forward(rank.tape, rank.model, rank.ones(), {2, 0, 1});
      if (step == 0) {  // an evaluation, which is no part of the order
        rank.tape.no_grad([&] { return forward(rank.tape, rank.model, rank.ones(), {1, 2}); });
      }
      rank.tape.backward(loss);
      rank.fsdp.finish_step();
      if (step == 0) continue;
      EXPECT_EQ(
          log.take(),
          (std::vector<std::string>{
              "all_gather root forward", "all_gather h.2 forward", "all_gather h.0 forward",
              "all_gather h.1 forward", "all_gather h.0 backward", "reduce_scatter h.1 gradient",
              "all_gather h.2 backward", "reduce_scatter h.0 gradient",
              "reduce_scatter h.2 gradient", "reduce_scatter root gradient", "all_gather norm"}));
    }
  });
}

// What comes next is known from the second step of a new order on: gathers then run ahead again.
TEST(FsdpOrder, PrefetchAdaptsToAnOrderThatChanges) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group, {}, 4);
    // What is gathered in forward, up to and including the moment when layer `order[at]` computes.
    const auto gathered_by = [&](const std::vector<int>& order, std::size_t at) {
      log.take();
      std::vector<std::string> lines;
      rank.fsdp.begin_step();
      rank.tape.backward(rank.tape.region(rank.model.root, [&] {
        Tensor x = affine(rank.tape, rank.ones(), rank.model.scale, nullptr);
        for (std::size_t i = 0; i < order.size(); ++i) {
          auto& l = *rank.model.layers[static_cast<std::size_t>(order[i])];
          x = rank.tape.region(l.block, [&] {
            if (i == at) lines = log.take();
            return affine(rank.tape, x, l.weight, &l.bias);
          });
        }
        return sum(rank.tape, x);
      }));
      rank.fsdp.finish_step();
      return lines;
    };
    using Lines = std::vector<std::string>;
    const auto lines = [](const std::vector<std::string>& names) {
      Lines all = {"all_gather root forward"};
      for (const std::string& name : names) all.push_back("all_gather " + name + " forward");
      return all;
    };
    const std::vector<int> one = {0, 1, 2, 3}, other = {3, 1, 0, 2};
    EXPECT_EQ(gathered_by(one, 1), lines({"h.0", "h.1", "h.2"}));
    // By the old order h.0 comes first, and it takes a slot that h.1 is to have.
    EXPECT_EQ(gathered_by(other, 1), lines({"h.0", "h.3", "h.1"}));
    EXPECT_EQ(gathered_by(other, 1), lines({"h.3", "h.1", "h.0"}));
    EXPECT_EQ(gathered_by(one, 1), lines({"h.3", "h.0", "h.1"}));
    EXPECT_EQ(gathered_by(one, 1), lines({"h.0", "h.1", "h.2"}));
  });
}

// The owner of a borrowed weight is gathered when the borrower needs it, and reduced once, behind
// the first use.
TEST(FsdpOrder, AnOwnerIsReducedBehindAllWhoBorrow) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group);
    for (int step = 0; step < 3; ++step) {
      log.take();
      rank.fsdp.begin_step();
      auto& owner = *rank.model.layers[0];
      const auto nothing = [](const Tensor& y) { return y; };
      rank.tape.backward(rank.tape.region(rank.model.root, [&] {
        Tensor h = affine(rank.tape, rank.ones(), rank.model.scale, nullptr);
        h = nested(rank.tape, rank.model, h, 0, nothing);
        h = nested(rank.tape, rank.model, h, 1, nothing);
        h = rank.tape.region(owner.block, [&] {
          return nested(rank.tape, rank.model, h, 2, [&](const Tensor& y) {
            return affine(rank.tape, y, owner.weight, nullptr);
          });
        });
        return sum(rank.tape, h);
      }));
      rank.fsdp.finish_step();
      if (step == 0) continue;
      std::vector<std::string> reductions;
      for (const std::string& line : log.take()) {
        if (line.starts_with("reduce")) reductions.push_back(line);
      }
      EXPECT_EQ(reductions, (std::vector<std::string>{
                                "reduce_scatter h.2 gradient", "reduce_scatter h.1 gradient",
                                "reduce_scatter h.0 gradient", "reduce_scatter root gradient"}));
    }
  });
}

// Each visit of a repeated block has its own place in the plan: what comes next after h.0 differs.
TEST(FsdpOrder, RepeatedBlocksFollowThePlanToo) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group);
    for (int step = 0; step < 3; ++step) {
      log.take();
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2, 0, 1, 2}));
      rank.fsdp.finish_step();
      if (step == 0) continue;
      EXPECT_EQ(
          log.take(),
          (std::vector<std::string>{
              "all_gather root forward", "all_gather h.0 forward", "all_gather h.1 forward",
              "all_gather h.2 forward", "all_gather h.0 forward", "all_gather h.1 forward",
              "all_gather h.2 forward", "all_gather h.1 backward", "all_gather h.0 backward",
              "all_gather h.2 backward", "all_gather h.1 backward", "reduce_scatter h.2 gradient",
              "all_gather h.0 backward", "reduce_scatter h.1 gradient",
              "reduce_scatter h.0 gradient", "reduce_scatter root gradient", "all_gather norm"}));
    }
  });
}

// The root's gradient is final when its last use is, though its region is still open.
TEST(FsdpOrder, ARootThatIsUsedLastIsReducedFirst) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group);
    for (int step = 0; step < 2; ++step) {
      log.take();
      rank.fsdp.begin_step();
      rank.tape.backward(forward_to_head(rank.tape, rank.model, rank.ones(), false));
      rank.fsdp.finish_step();
    }
    EXPECT_EQ(
        log.take(),
        (std::vector<std::string>{
            "all_gather root forward", "all_gather h.0 forward", "all_gather h.1 forward",
            "all_gather h.2 forward", "all_gather h.1 backward", "reduce_scatter h.2 gradient",
            "reduce_scatter root gradient", "all_gather h.0 backward",
            "reduce_scatter h.1 gradient", "reduce_scatter h.0 gradient", "all_gather norm"}));
  });
}

// Of two forwards, the backward of the second gathers ahead the last block of the first, and not
// the root, which has a slot of its own.
TEST(FsdpOrder, TheRootDoesNotCountAsGatheredAhead) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group, {}, 2);
    rank.fsdp.begin_step();
    const Tensor first = forward(rank.tape, rank.model, rank.ones(), {0, 1});
    const Tensor second = forward(rank.tape, rank.model, rank.ones(), {0, 1});
    log.take();
    rank.tape.backward(std::vector<Tensor>{first, second});
    rank.fsdp.finish_step();
    EXPECT_EQ(log.take(), (std::vector<std::string>{
                              "all_gather h.0 backward", "all_gather h.1 backward",
                              "all_gather root backward", "all_gather h.0 backward",
                              "reduce_scatter h.1 gradient", "reduce_scatter h.0 gradient",
                              "reduce_scatter root gradient", "all_gather norm"}));
  });
}

// Everywhere but where ranks may leave out different units, which is with whole parameters alone.
TEST(FsdpOrder, UnitsAreReducedAsTheirGradientsAreDone) {
  for (const auto& [strategy, unused] : {std::pair{"zero3", UnusedParameters::kZero},
                                         {"zero3", UnusedParameters::kSkip},
                                         {"ddp", UnusedParameters::kZero}}) {
    comm::run_ranks(2, {}, [&, strategy = strategy, unused = unused](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      Rank rank(group, {.placement = Placement::preset(strategy), .unused_parameters = unused});
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {2, 0}));
      rank.fsdp.finish_step();
      std::vector<std::string> reduced;
      for (const std::string& line : log.take()) {
        if (line.ends_with("gradient")) reduced.push_back(line.substr(line.find(' ') + 1));
      }
      EXPECT_EQ(reduced,
                (std::vector<std::string>{"h.0 gradient", "h.2 gradient", "root gradient"}))
          << strategy;
    });
  }
}

// Ranks call the collectives of a group in one order. Streams go on beside each other, so a group
// is for one of them.
TEST(FsdpOrder, GathersAndReductionsHaveGroupsOfTheirOwn) {
  for (const char* strategy : {"zero1", "zero2", "zero3", "hsdp", "hybrid_zero2", "hfsdp"}) {
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      Rank rank(group, {.placement = Placement::preset(strategy),
                        .shard_ranks = is_hybrid(strategy) ? 2 : 0});
      Sgd optimizer(rank.fsdp, {});
      log.take();  // before the first step: the plan, over compute
      for (int step = 0; step < 2; ++step) {
        rank.fsdp.begin_step();
        rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2}));
        rank.fsdp.finish_step();
        optimizer.step(1e-3);
      }
      std::map<const ProcessGroup*, std::string> streams;
      for (const CollectiveLog::Record& record : log.records()) {
        const auto it = streams.emplace(record.group, record.stream).first;
        EXPECT_EQ(record.stream, it->second) << strategy << ": " << record.text;
      }
    });
  }
}

// One forward and its backward; the functions are called while each layer is at work.
void observe(Rank& rank, const std::function<void(ToyModel::Layer&)>& in_forward,
             const std::function<void(ToyModel::Layer&)>& in_backward) {
  rank.fsdp.begin_step();
  rank.tape.backward(rank.tape.region(rank.model.root, [&] {
    Tensor x = affine(rank.tape, rank.ones(), rank.model.scale, nullptr);
    for (const auto& l : rank.model.layers) {
      x = rank.tape.region(l->block, [&] {
        in_forward(*l);
        const Tensor y = affine(rank.tape, x, l->weight, &l->bias);
        const Tensor seen = rank.tape.empty({kNumel}, DType::kF32, "seen");
        engine::cast(seen, y);
        rank.tape.record("see", seen, [&, y, &l = *l](const Tensor& dy) {
          in_backward(l);
          rank.tape.pass_grad(y, dy);
        });
        return seen;
      });
    }
    return sum(rank.tape, x);
  }));
  rank.fsdp.finish_step();
}

TEST(FsdpOrder, PrefetchIsHowManyUnitsAreGatheredAhead) {
  constexpr int kBlocks = 5;
  for (const int prefetch : {0, 1, 2, 3}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      Rank rank(group, {.prefetch = prefetch}, kBlocks);
      for (int step = 0; step < 2; ++step) {
        log.take();
        int num_forward = 0, num_backward = 0, num_entered = 0;
        const auto count = [&](ToyModel::Layer&) {
          for (const std::string& line : log.take()) {
            num_forward += line.starts_with("all_gather h.") && line.ends_with("forward");
            num_backward += line.starts_with("all_gather h.") && line.ends_with("backward");
          }
          ++num_entered;
        };
        observe(
            rank,
            [&](ToyModel::Layer& l) {
              count(l);
              EXPECT_EQ(num_forward, std::min(num_entered + prefetch, kBlocks)) << l.block.name;
              EXPECT_EQ(num_backward, 0);
            },
            [&](ToyModel::Layer& l) {
              count(l);
              // The last unit of forward is kept.
              EXPECT_EQ(num_backward, std::min(num_entered - kBlocks - 1 + prefetch, kBlocks - 1))
                  << l.block.name;
            });
        EXPECT_EQ(num_entered, 2 * kBlocks);
      }
    });
  }
}

// The next forward finds them, or at least their gathers begun.
TEST(FsdpOrder, WhatForwardNeedsFirstIsGatheredBehindTheUpdate) {
  for (const std::size_t prefetch : {0, 1, 2}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      Rank rank(group, {.prefetch = static_cast<int>(prefetch)});
      Sgd optimizer(rank.fsdp, {});
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {1, 2, 0}));
      rank.fsdp.finish_step();
      log.take();
      optimizer.step(1e-3);
      std::vector<std::string> expected = {"all_gather root forward", "all_gather h.1 forward",
                                           "all_gather h.2 forward"};
      expected.resize(1 + prefetch);
      EXPECT_EQ(log.take(), expected);
    });
  }
}

TEST(FsdpOrder, GradientsAreReducedEveryMicroStepOrOnce) {
  constexpr int kMicroSteps = 3;
  std::vector<float> norms;
  for (const bool no_sync : {false, true}) {
    for (const auto& [strategy, unused] : {std::pair{"zero3", UnusedParameters::kZero},
                                           {"ddp", UnusedParameters::kZero},
                                           {"ddp", UnusedParameters::kSkip}}) {
      comm::run_ranks(2, {}, [&, strategy = strategy, unused = unused](ProcessGroup& world) {
        CollectiveLog log;
        LoggedGroup group(world, log);
        Rank rank(group, {.placement = Placement::preset(strategy), .unused_parameters = unused});
        rank.fsdp.begin_step(kMicroSteps, {.no_sync = no_sync});
        for (int micro = 0; micro < kMicroSteps; ++micro) {
          if (micro > 0) rank.fsdp.next_micro_step({.no_sync = no_sync && micro + 1 < kMicroSteps});
          rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2}));
        }
        const float norm = rank.fsdp.finish_step().value();
        int num_reductions = 0;
        for (const std::string& line : log.take()) num_reductions += line.ends_with("gradient");
        EXPECT_EQ(num_reductions, (no_sync ? 1 : kMicroSteps) * 4) << strategy;
        if (world.rank() == 0) norms.push_back(norm);
      });
    }
  }
  for (const float norm : norms) EXPECT_NEAR(norm / norms[0], 1, 1e-5);
}

// So the next unit's backward does not wait for the reduction of the one before.
TEST(FsdpGradients, OfNeighboursLieInDifferentSlots) {
  for (const int reductions_in_flight : {1, 2}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      Rank rank(world, {.prefetch = 0, .reductions_in_flight = reductions_in_flight}, 4);
      std::vector<const std::byte*> slots;
      observe(
          rank, [](ToyModel::Layer&) {},
          [&](ToyModel::Layer& l) { slots.push_back(l.weight.grad.raw()); });
      ASSERT_EQ(slots.size(), 4u);
      for (std::size_t i = 1; i < slots.size(); ++i) EXPECT_NE(slots[i], slots[i - 1]) << i;
    });
  }
}

TEST(FsdpGradients, OfASkippedBlockAreZero) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    for (const bool skip : {false, true, false}) {
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.ones(),
                                 skip ? std::vector<int>{0, 2} : std::vector<int>{0, 1, 2}));
      rank.fsdp.finish_step();
      const Flat& flat = rank.fsdp.units()[1]->flats().front();
      bool any = false;
      for (const Segment& s : flat.segments) {
        for (std::int64_t i = 0; i < s.numel; ++i) {
          any = any || flat.grad_sum.device().data<float>()[s.shard_begin + i] != 0;
        }
      }
      EXPECT_EQ(any, !skip);
    }
  });
}

TEST(FsdpWorlds, FiveAndSevenRanksEqualOne) {
  const PassFn plain = patterns().front().run;
  const std::vector<float> expected = train_pattern({.ranks = 1, .accum = 35, .steps = 2}, plain);
  for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
    for (const int ranks : {5, 7}) {
      Training run{.ranks = ranks, .accum = 35 / ranks, .steps = 2};
      run.options.placement = Placement::preset(strategy);
      EXPECT_EQ(train_pattern(run, plain), expected) << strategy << " ranks " << ranks;
    }
  }
}

// A part of what was gathered is copied, and only then is its slot another unit's.
TEST(FsdpParameters, WhatIsKeptForBackwardIsThatOfItsUnit) {
  const PassFn plain = [](Tape& tape, ToyModel& model, const Tensor& x, int) {
    tape.backward(forward(tape, model, x, {0, 1, 2, 3}));
  };
  Training run{.ranks = 4, .accum = 3};
  const std::vector<float> expected = train_pattern(run, plain);
  run.is_async = true;
  run.options.placement.reshard_ranks = 2;
  for (const int prefetch : {0, 1}) {
    for (const bool poison : {false, true}) {
      run.options.prefetch = prefetch;
      run.poison = poison;
      EXPECT_EQ(train_pattern(run, plain), expected) << prefetch << " poison " << poison;
    }
  }
}

// Backward gathers from those who keep a copy together; the last unit, and the root, are kept
// whole.
TEST(FsdpParameters, AreKeptForBackwardByNeighbours) {
  comm::run_ranks(8, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group, {.placement = {.reshard_ranks = 2}, .shard_ranks = 4});
    const ProcessGroup* neighbours = rank.fsdp.mesh().reshard();
    ASSERT_NE(neighbours, nullptr);
    EXPECT_EQ(neighbours->size(), 2);
    EXPECT_EQ(neighbours->rank(), world.rank() % 2);
    rank.fsdp.begin_step();
    const Tensor loss = forward(rank.tape, rank.model, rank.ones(), {0, 1, 2});
    for (const CollectiveLog::Record& record : log.records()) {
      if (record.text.ends_with("forward")) {
        EXPECT_EQ(record.num_ranks, 4) << record.text;
      }
    }
    rank.tape.backward(loss);
    rank.fsdp.finish_step();
    int num_gathers = 0;
    for (const CollectiveLog::Record& record : log.records()) {
      if (!record.text.ends_with("backward")) continue;
      EXPECT_EQ(record.group, neighbours) << record.text;
      ++num_gathers;
    }
    EXPECT_EQ(num_gathers, 2);
  });
}

TEST(FsdpParameters, LoadAndFullParameterRoundTrip) {
  for (const int ranks : {1, 2, 3, 5, 7}) {
    for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
      comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
        const Memory memory({.poison = true});
        ToyModel model(5, 1);
        const std::vector<std::int64_t> sizes = {1, 127, 128, 129, 1000};
        for (std::size_t i = 0; i < sizes.size(); ++i) {
          model.layers[i]->weight.shape = {sizes[i]};
          model.layers[i]->bias.shape = {static_cast<std::int64_t>(i) % 2, 3};
        }
        Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root,
                  {.placement = Placement::preset(strategy), .unit_min_numel = 250});
        for (const Parameter* p : fsdp.parameters()) {
          std::vector<float> initial(static_cast<std::size_t>(p->shape.numel()));
          p->init.write(initial.data(), 0, p->shape.numel(), p->name, 1);
          EXPECT_EQ(fsdp.full_parameter(*p), initial) << p->name;
        }
        const auto value = [](std::size_t parameter, std::size_t i) {
          return static_cast<float>(1000 * parameter + i);
        };
        const auto all = fsdp.parameters();
        for (std::size_t n = 0; n < all.size(); ++n) {
          std::vector<float> values(static_cast<std::size_t>(all[n]->shape.numel()));
          for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(n, i);
          fsdp.load(*all[n], values);
        }
        fsdp.parameters_changed();
        for (std::size_t n = 0; n < all.size(); ++n) {
          const std::vector<float> values = fsdp.full_parameter(*all[n]);
          ASSERT_EQ(values.size(), static_cast<std::size_t>(all[n]->shape.numel()));
          for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], value(n, i));
        }
        Parameter stranger{.name = "stranger", .shape = {1}};
        EXPECT_TRUE(
            has(error_of<InvalidArgument>([&] { fsdp.full_parameter(stranger); }), {"stranger"}));
        EXPECT_TRUE(has(error_of<InvalidArgument>([&] { fsdp.load(*all[1], {}); }),
                        {all[1]->name, "got 0"}));
      });
    }
  }
}

TEST(FsdpParameters, ChangesReachUnitsThatWerePrefetchedAndNotUsed) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    // Late on one rank: the gather is still reading when load() is called.
    Rank rank(world, {.delay_seed = world.rank() == 0 ? 0u : 5u});
    const auto evaluate = [&](const std::vector<int>& order) {
      return rank.tape.no_grad([&] { return forward(rank.tape, rank.model, rank.ones(), order); })
          .item();
    };
    for (const float value : {2.0f, 3.0f}) {
      evaluate({0});  // gathers h.1 ahead
      for (const Parameter* p : rank.fsdp.parameters()) {
        rank.fsdp.load(*p, std::vector<float>(kNumel, value));
      }
      rank.fsdp.parameters_changed();
      float y = value;
      for (int i = 0; i < 3; ++i) y = value * y + value;
      EXPECT_EQ(evaluate({0, 1, 2}), float{kNumel} * value * y);
    }
  });
}

TEST(FsdpParameters, ChangesReachAPackedUnitThatWasLeftHalfway) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const Memory memory({.poison = true});
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    ToyModel model(2, kNumel);
    Fsdp fsdp(world, memory, compute, model.blocks(), nullptr, {.unit_min_numel = 1000});
    ASSERT_EQ(fsdp.units().size(), 1u);
    const Tensor x = Tensor::from<float>(memory, {kNumel}, std::vector<float>(kNumel, 1.0f));
    const auto evaluate = [&](std::size_t i) {
      auto& l = *model.layers[i];
      return tape.no_grad([&] {
        return sum(tape, tape.region(l.block, [&] { return affine(tape, x, l.weight, &l.bias); }));
      });
    };
    evaluate(0);
    for (const Parameter* p : fsdp.parameters()) {
      fsdp.load(*p, std::vector<float>(kNumel, 2.0f));
    }
    fsdp.parameters_changed();
    EXPECT_EQ(evaluate(1).item(), 4.0f * kNumel);
  });
}

// The same of a unit that an evaluation between finish_step() and the update left halfway.
TEST(FsdpParameters, UpdatesReachAPackedUnitThatWasLeftHalfway) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world, {.prefetch = 0, .unit_min_numel = 1000}, 2);
    Sgd optimizer(rank.fsdp, {});
    const auto layer = [&](const Tensor& x, std::size_t i) {
      auto& l = *rank.model.layers[i];
      return rank.tape.region(l.block, [&] { return affine(rank.tape, x, l.weight, &l.bias); });
    };
    rank.fsdp.begin_step();
    rank.tape.backward(sum(rank.tape, layer(layer(rank.ones(), 0), 1)));
    rank.fsdp.finish_step();
    const auto evaluate = [&](std::size_t i) {
      return rank.tape.no_grad([&] { return sum(rank.tape, layer(rank.ones(), i)); }).item();
    };
    evaluate(0);
    optimizer.step(1);
    float expected = 0;
    const std::vector<float> weight = rank.fsdp.full_parameter(rank.model.layers[1]->weight);
    const std::vector<float> bias = rank.fsdp.full_parameter(rank.model.layers[1]->bias);
    for (std::size_t i = 0; i < weight.size(); ++i) expected += weight[i] + bias[i];
    EXPECT_EQ(evaluate(1), expected);
  });
}

TEST(FsdpUnits, ArePackedUntilLargeEnough) {
  const auto names = [](std::int64_t unit_min_numel, int num_blocks) {
    std::vector<std::string> result;
    comm::run_ranks(1, {}, [&](ProcessGroup& world) {
      const Rank rank(world, {.unit_min_numel = unit_min_numel}, num_blocks);
      for (const auto& unit : rank.fsdp.units()) result.push_back(unit->name());
    });
    return result;
  };
  using Names = std::vector<std::string>;
  constexpr std::int64_t kBlock = 2 * kNumel;
  for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, kBlock}) {
    EXPECT_EQ(names(n, 3), (Names{"h.0", "h.1", "h.2", "root"})) << n;
  }
  EXPECT_EQ(names(kBlock + 1, 3), (Names{"h.0..h.1", "h.2", "root"}));
  EXPECT_EQ(names(2 * kBlock, 4), (Names{"h.0..h.1", "h.2..h.3", "root"}));
  EXPECT_EQ(names(std::numeric_limits<std::int64_t>::max(), 3), (Names{"h.0..h.2", "root"}));
  EXPECT_EQ(names(5, 0), (Names{"root"}));
}

TEST(FsdpNesting, WorksWithinTheRingAndBeyondIt) {
  const auto nested = [](Rank& rank, std::size_t depth) {
    const std::function<Tensor(Tensor, std::size_t)> at = [&](Tensor x, std::size_t i) -> Tensor {
      auto& l = *rank.model.layers[i];
      return rank.tape.region(l.block, [&] {
        const Tensor y = affine(rank.tape, x, l.weight, &l.bias);
        return i + 1 == depth ? y : affine(rank.tape, at(y, i + 1), l.weight, nullptr);
      });
    };
    return sum(rank.tape, at(rank.ones(), 0));
  };
  const auto norm = [&](const FsdpOptions& options, std::size_t depth) {
    float result = 0;
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      Rank rank(world, options);
      rank.fsdp.begin_step();
      rank.tape.backward(nested(rank, depth));
      const float mine = rank.fsdp.finish_step().value();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  for (const std::size_t depth : {2, 3}) {
    const float expected = norm({.placement = Placement::preset("ddp")}, depth);
    for (const char* strategy : {"zero3", "shard_grad_op", "zero2"}) {
      for (const int prefetch : {0, 1, 2}) {
        EXPECT_EQ(norm({.placement = Placement::preset(strategy), .prefetch = prefetch}, depth),
                  expected)
            << strategy << " prefetch " << prefetch << " depth " << depth;
      }
    }
  }
}

TEST(FsdpSteps, AStepMayBeAbandonedAndBegunAgain) {
  for (const bool no_sync : {false, true}) {
    for (const char* strategy : {"zero3", "shard_grad_op", "zero2", "zero1", "ddp"}) {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        Rank rank(world, {.placement = Placement::preset(strategy)});
        const auto step = [&] {
          rank.fsdp.begin_step(2, {.no_sync = no_sync});
          for (int micro = 0; micro < 2; ++micro) {
            if (micro > 0) rank.fsdp.next_micro_step();
            rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2}));
          }
          return rank.fsdp.finish_step().value();
        };
        const float expected = step();
        for (const bool in_backward : {false, true}) {
          rank.fsdp.begin_step(2, {.no_sync = no_sync});
          rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2}));
          rank.fsdp.next_micro_step();
          auto& l = *rank.model.layers[0];
          const auto fails = [&] {
            const Tensor y = affine(rank.tape, rank.ones(), l.weight, &l.bias);
            if (!in_backward) engine::fail("[toy] a bad batch");
            const Tensor z = rank.tape.empty(y.shape(), y.dtype(), "bad");
            rank.tape.record("bad", z, [](const Tensor&) { engine::fail("[toy] a bad batch"); });
            // Written, and then the step dies: the gradient must not be seen again.
            return sum(rank.tape, affine(rank.tape, z, l.weight, &l.bias));
          };
          EXPECT_EQ(error_of<InvalidArgument>(
                        [&] { rank.tape.backward(rank.tape.region(l.block, fails)); }),
                    "[toy] a bad batch");
          rank.tape.clear();
          EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.begin_step(); }),
                          {"cancel_step", "2 of 2"}));
          rank.fsdp.cancel_step();
          EXPECT_EQ(step(), expected) << strategy << " in backward " << in_backward;
        }
      });
    }
  }
}

TEST(FsdpSteps, GiveBackWhatWasGatheredWhenAbandoned) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group);
    std::vector<std::string> expected;
    for (const bool is_behind : {false, true}) {
      log.take();
      rank.fsdp.begin_step();
      const Tensor loss = forward(rank.tape, rank.model, rank.ones(), {0, 1, 2});
      if (!is_behind) expected = log.take();
      if (is_behind) {
        EXPECT_EQ(log.take(), expected);
      }
      rank.fsdp.cancel_step();  // h.2 and the root are gathered
      rank.tape.clear();
    }
  });
}

// Counts the calls of agree() on itself and on what is split from it.
class AgreeingGroup : public LoggedGroup {
 public:
  struct Counts {
    CollectiveLog log;
    int groups = 0, calls = 0;
  };
  AgreeingGroup(ProcessGroup& inner, Counts& counts)
      : LoggedGroup(inner, counts.log), counts_(counts) {
    ++counts_.groups;
  }
  AgreeingGroup(std::unique_ptr<ProcessGroup> inner, Counts& counts)
      : LoggedGroup(std::move(inner), counts.log), counts_(counts) {
    ++counts_.groups;
  }
  void agree(const Stream& stream) override {
    ++counts_.calls;
    LoggedGroup::agree(stream);
  }
  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<AgreeingGroup>(LoggedGroup::make_part(color, key), counts_);
  }

 private:
  Counts& counts_;
};

// Where a backend does not compare each call as it is made, this is when ranks that differ are
// told.
TEST(FsdpSteps, CompareTheCallsOfEveryGroup) {
  for (const char* strategy : {"ddp", "zero3", "hsdp"}) {
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      AgreeingGroup::Counts counts;
      AgreeingGroup group(world, counts);
      Rank rank(group, {.placement = Placement::preset(strategy),
                        .shard_ranks = is_hybrid(strategy) ? 2 : 0});
      counts.calls = 0;
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2}));
      rank.fsdp.finish_step();
      EXPECT_EQ(counts.calls, counts.groups) << strategy;
    });
  }
}

TEST(FsdpSteps, AreRefusedOutOfOrder) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    Rank rank(world);
    EXPECT_THROW(rank.fsdp.finish_step(), InvalidArgument);
    EXPECT_THROW(rank.fsdp.next_micro_step(), InvalidArgument);
    EXPECT_THROW(rank.fsdp.begin_step(0), InvalidArgument);
    rank.fsdp.begin_step(2);
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.finish_step(); }), {"2", "1"}));
    rank.fsdp.next_micro_step();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.next_micro_step(); }), {"2"}));
    rank.fsdp.cancel_step();
    rank.fsdp.begin_step();
    forward(rank.tape, rank.model, rank.ones(), {0, 1, 2});
    EXPECT_TRUE(
        has(error_of<InvalidArgument>([&] { rank.fsdp.finish_step(); }), {"backward", "h.0"}));
    rank.tape.clear();
  });
}

TEST(FsdpSteps, OtherMistakesAreNamed) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    Rank rank(world);
    const auto error = [](const std::function<void()>& fn) {
      return error_of<InvalidArgument>(fn);
    };
    const auto pass = [&] {
      rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2}));
    };
    EXPECT_TRUE(has(error(pass), {"begin_step"}));
    rank.fsdp.begin_step();
    pass();
    EXPECT_TRUE(has(error(pass), {"1 backward", "num_backwards"}));
    rank.fsdp.cancel_step();
    EXPECT_TRUE(has(error([&] { rank.fsdp.begin_step(1, {.no_sync = true}); }), {"no_sync"}));
    EXPECT_TRUE(has(error([&] { rank.fsdp.begin_step(1, {.num_backwards = 0}); }), {"0"}));
    rank.fsdp.begin_step();
    pass();
    EXPECT_TRUE(has(error([&] { rank.fsdp.full_gradient(rank.model.scale); }), {"finish_step"}));
    rank.fsdp.finish_step();
    rank.model.layers[1]->bias.trainable = false;
    EXPECT_TRUE(has(error([&] { rank.fsdp.begin_step(); }), {"trainable", "h.1.bias"}));
    rank.model.layers[1]->bias.trainable = true;
    rank.fsdp.begin_step();  // and an evaluation that forgot no_grad
    forward(rank.tape, rank.model, rank.ones(), {0, 1, 2});
    EXPECT_TRUE(has(error([&] { rank.fsdp.finish_step(); }), {"no_grad"}));
    rank.tape.clear();
  });
}

TEST(FsdpSteps, AForwardThatWasRecordedBetweenThemIsNamed) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    for (const int num_before : {0, 1}) {
      Rank rank(world);
      const auto loss = [&] { return forward(rank.tape, rank.model, rank.ones(), {2, 1, 0}); };
      const auto step = [&] {
        rank.fsdp.begin_step(2);
        for (int micro = 0; micro < 2; ++micro) {
          if (micro > 0) rank.fsdp.next_micro_step();
          const Tensor first = loss();
          rank.tape.no_grad(loss);
          rank.tape.backward({first, loss()});
        }
        return rank.fsdp.finish_step().value();
      };
      for (int i = 0; i < num_before; ++i) step();
      const Tensor evaluated = loss();
      EXPECT_EQ(error_of<InvalidArgument>(step),
                "[fsdp] expected no recorded forward from before this step, got one of 'h.0' that "
                "never ran backward: wrap evaluations in tape.no_grad(), or forget them with "
                "tape.clear()");
      rank.tape.clear();
      rank.fsdp.cancel_step();
      EXPECT_GT(step(), 0);
      // That nothing comes between makes it no part of the step either.
      const Tensor early = loss();
      rank.fsdp.begin_step();
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.tape.backward(early); }),
                      {"recorded in this step", "begin_step() before the forward", "no_grad"}));
      rank.fsdp.cancel_step();
      EXPECT_GT(step(), 0);
    }
  });
}

// A block inside a recomputed one is visited again in backward: that is no new order of forward.
TEST(FsdpOrder, AReplayOfNestedUnitsDoesNotCutTheRecordedOrder) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group, {.prefetch = 1}, 4);
    const auto layer = [&](const Tensor& x, std::size_t i) {
      auto& l = *rank.model.layers[i];
      return affine(rank.tape, x, l.weight, &l.bias);
    };
    const auto pass = [&] {
      return rank.tape.region(rank.model.root, [&] {
        Tensor x = affine(rank.tape, rank.ones(), rank.model.scale, nullptr);
        x = rank.tape.region(rank.model.layers[0]->block, [&] { return layer(x, 0); });
        x = rank.tape.region(rank.model.layers[1]->block,
                             [x, &rank, layer] {
                               const Tensor y = layer(x, 1);
                               return rank.tape.region(rank.model.layers[2]->block,
                                                       [=] { return layer(y, 2); });
                             },
                             {.recompute = true});
        x = rank.tape.region(rank.model.layers[3]->block, [&] { return layer(x, 3); });
        return sum(rank.tape, x);
      });
    };
    for (int step = 0; step < 3; ++step) {
      log.take();
      rank.fsdp.begin_step();
      rank.tape.backward(pass());
      rank.fsdp.finish_step();
      EXPECT_EQ(log.take(),
                (std::vector<std::string>{
                    "all_gather root forward", "all_gather h.0 forward", "all_gather h.1 forward",
                    "all_gather h.2 forward", "all_gather h.3 forward", "all_gather h.1 backward",
                    "reduce_scatter h.3 gradient", "all_gather h.2 forward",
                    "reduce_scatter h.2 gradient", "reduce_scatter h.1 gradient",
                    "all_gather h.0 backward", "reduce_scatter h.0 gradient",
                    "reduce_scatter root gradient", "all_gather norm"}))
          << step;
    }
  });
}

// What a person hands in as a communication hook: here half of each gradient is lost on the way.
TEST(FsdpReducer, OfOnesOwnDecidesWhatIsSent) {
  struct Halving : Reducer {
    explicit Halving(const ReducerContext& context)
        : Reducer(context), inner(make_reducer(context)), stream(context.stream) {}
    void begin_step() override { inner->begin_step(); }
    void reduce(const Tensor& in, const engine::Event& ready, bool is_last) override {
      stream.wait(ready);
      stream.launch({.name = "halve"}, [in, data = in.raw()] {
        for (std::int64_t i = 0; i < in.numel(); ++i) reinterpret_cast<float*>(data)[i] *= 0.5f;
      });
      inner->reduce(in, ready, is_last);
    }
    void finish() override {
      inner->finish();
      engine::launch_assign_or_add(stream, sum_, inner->sum(), false, "take");
    }
    std::unique_ptr<Reducer> inner;
    Stream stream;
  };
  const ReducerFactory halving = [](const ReducerContext& context) {
    return std::make_unique<Halving>(context);
  };
  for (const char* strategy : {"zero3", "ddp", "zero1"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      std::vector<float> norms;
      for (const ReducerFactory& reducer : {ReducerFactory(), halving}) {
        Rank rank(world, {.placement = Placement::preset(strategy), .reducer = reducer});
        rank.fsdp.begin_step();
        rank.tape.backward(forward(rank.tape, rank.model, rank.ones(), {0, 1, 2}));
        norms.push_back(rank.fsdp.finish_step().value());
      }
      EXPECT_EQ(norms[1], norms[0] / 2) << strategy;
    });
  }
}

TEST(FsdpParameters, OneRanksValuesBecomeThoseOfAll) {
  for (const char* strategy : {"zero3", "ddp", "zero1", "hfsdp"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      Rank rank(world, {.placement = Placement::preset(strategy)});
      std::vector<float> values(kNumel);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(i + 1000 * static_cast<std::size_t>(world.rank()));
      }
      const auto expected = [](int root) {
        std::vector<float> all(kNumel);
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = float(i) + 1000.0f * float(root);
        return all;
      };
      const Parameter& bias = rank.model.layers[1]->bias;
      rank.fsdp.load_from(1, bias, world.rank() == 1 ? values : std::vector<float>());
      rank.fsdp.parameters_changed();
      EXPECT_EQ(rank.fsdp.full_parameter(bias), expected(1)) << strategy;
      const Tensor buffer = Tensor::from<float>(rank.memory, {kNumel}, values, "running_mean");
      rank.fsdp.broadcast({buffer});
      rank.compute.synchronize();
      EXPECT_EQ(std::vector<float>(buffer.span<float>().begin(), buffer.span<float>().end()),
                expected(0));
    });
  }
}

// Nobody updates them, so there is nothing to keep in f32 beside what is computed with.
TEST(FsdpParameters, FrozenOnesHaveNoMaster) {
  for (const char* strategy : {"zero3", "zero1", "ddp", "hfsdp"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      const auto nbytes = [&](bool freeze) {
        const Memory memory;
        const Stream compute = Stream::inline_cpu("compute");
        ToyModel model(1, 128);
        auto& l = *model.layers[0];
        l.weight.trainable = l.bias.trainable = !freeze;
        Fsdp fsdp(world, memory, compute, model.blocks(), nullptr,
                  {.placement = Placement::preset(strategy), .precision = {.param = DType::kBF16}});
        fsdp.load(l.bias, std::vector<float>(128, 1.00390625f));  // between two bf16 values
        fsdp.parameters_changed();
        EXPECT_EQ(fsdp.full_parameter(l.bias)[5], freeze ? 1.0f : 1.00390625f);
        return memory.stats().current_nbytes[std::size_t(engine::Category::kParameterShard)];
      };
      const bool is_whole = Placement::preset(strategy).parameters == Place::kWhole;
      EXPECT_EQ(nbytes(true), 2 * 256 / (is_whole ? 1 : 2)) << strategy;
      EXPECT_GT(nbytes(false), nbytes(true));
    });
  }
}

TEST(FsdpShapes, DegenerateModelsTrain) {
  comm::run_ranks(3, {}, [](ProcessGroup& world) {
    const Memory memory({.poison = true});
    const Stream compute = Stream::inline_cpu("compute");
    for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
      const FsdpOptions options{.placement = Placement::preset(strategy),
                                .prefetch = std::numeric_limits<int>::max()};
      Tape tape(memory, compute);
      const Tensor x = Tensor::from<float>(memory, {kNumel}, std::vector<float>(kNumel, 1.0f));
      {  // nothing at all
        Fsdp fsdp(world, memory, compute, {}, nullptr, options);
        Sgd optimizer(fsdp, {});
        fsdp.begin_step();
        EXPECT_EQ(fsdp.finish_step().value(), 0);
        optimizer.step(1);
      }
      {  // no root, and a block without parameters between two with
        ToyModel model(3, kNumel);
        model.layers[1]->block.parameters.clear();
        Fsdp fsdp(world, memory, compute, model.blocks(), nullptr, options);
        Sgd optimizer(fsdp, {});
        const std::vector<float> before = fsdp.full_parameter(model.layers[2]->bias);
        for (int step = 0; step < 2; ++step) {
          fsdp.begin_step();
          Tensor h = x;
          for (const std::size_t i : {0, 1, 2}) {
            auto& l = *model.layers[i];
            h = tape.region(l.block,
                            [&] { return i == 1 ? h : affine(tape, h, l.weight, &l.bias); });
          }
          tape.backward(sum(tape, h));
          EXPECT_GT(fsdp.finish_step().value(), 0);
          optimizer.step(0.5);
        }
        // d loss / d bias of the last block is 1.
        const std::vector<float> after = fsdp.full_parameter(model.layers[2]->bias);
        for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i], before[i] - 0.5f - 0.5f);
      }
      {  // one block, no root
        ToyModel model(1, kNumel);
        Fsdp fsdp(world, memory, compute, model.blocks(), nullptr, options);
        fsdp.begin_step();
        auto& l = *model.layers[0];
        tape.backward(
            sum(tape, tape.region(l.block, [&] { return affine(tape, x, l.weight, &l.bias); })));
        EXPECT_FLOAT_EQ(fsdp.finish_step().value(), std::sqrt(2.0f * kNumel));
      }
    }
  });
}

TEST(FsdpWorlds, SeveralWrappersOfOneGroupDoNotDisturbEachOther) {
  std::vector<float> alone, together;
  for (const int count : {1, 2}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      std::vector<std::unique_ptr<Rank>> models;
      for (int i = 0; i < count; ++i) {
        models.push_back(std::make_unique<Rank>(
            world, FsdpOptions{.seed = 1 + static_cast<std::uint64_t>(i),
                               .delay_seed = 5 + static_cast<std::uint64_t>(world.rank())}));
      }
      std::vector<float> norms;
      for (int step = 0; step < 3; ++step) {
        std::vector<Tensor> losses;
        for (const auto& m : models) {
          m->fsdp.begin_step();
          losses.push_back(forward(m->tape, m->model, m->ones(), {0, 1, 2}));
        }
        for (std::size_t i = 0; i < models.size(); ++i) {
          models[i]->tape.backward(losses[i]);
          const float norm = models[i]->fsdp.finish_step().value();
          if (i == 0) norms.push_back(norm);
          Sgd(models[i]->fsdp, {}).step(1e-3);
        }
      }
      if (world.rank() == 0) (count == 1 ? alone : together) = norms;
    });
  }
  EXPECT_EQ(alone, together);
}

TEST(FsdpBlocks, AreUnwrappedAtTheEndAndNotWrappedTwice) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute");
    ToyModel model(2, kNumel);
    for (int i = 0; i < 2; ++i) {
      const Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, {});
      EXPECT_NE(model.root.hooks, nullptr);
      EXPECT_TRUE(has(error_of<InvalidArgument>(
                          [&] { Fsdp(world, memory, compute, model.blocks(), &model.root, {}); }),
                      {"h.0", "wrapped"}));
      EXPECT_NE(model.layers[0]->block.hooks, nullptr) << "the first wrapper keeps it";
    }
    EXPECT_EQ(model.root.hooks, nullptr);
    EXPECT_EQ(model.layers[1]->block.hooks, nullptr);
  });
}

TEST(FsdpPlan, DifferencesInLongNamesAreNamed) {
  const std::string error = error_of<InvalidArgument>([] {
    comm::run_ranks(2, {}, [](ProcessGroup& world) {
      const Memory memory({.cache = false});
      ToyModel model(1, kNumel);
      model.layers[0]->weight.name = (world.rank() == 0 ? "a" : "b") + std::string(500, 'x');
      const Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root,
                      {});
    });
  });
  EXPECT_TRUE(has(error, {"[plan]", "rank 0 '  axx", "rank 1 '  bxx"}));
  EXPECT_LT(error.size(), 600u);
}

}  // namespace
}  // namespace tessera::shard
