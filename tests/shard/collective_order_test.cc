// The order of gathers and reductions: it follows the forward of the step before, runs ahead as far
// as it may, and reduces what is final. And which groups, streams and slots they use.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/elementwise.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/usage_patterns.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::CollectiveLog;
using tessera::testing::forward;
using tessera::testing::LoggedGroup;
using tessera::testing::sum;
using tessera::testing::ToyModel;
using tessera::testing::ToyRank;

constexpr std::int64_t kNumel = testing::kPatternNumel;

TEST(CollectiveOrder, TheNextStepFollowsTheRecordedOrder) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group);
    for (int step = 0; step < 3; ++step) {
      log.take();
      rank.fsdp.begin_step();
      const Tensor loss = forward(rank.tape, rank.model, rank.input(), {2, 0, 1});
      if (step == 0) {  // an evaluation, which is no part of the order
        rank.tape.no_grad([&] { return forward(rank.tape, rank.model, rank.input(), {1, 2}); });
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
TEST(CollectiveOrder, PrefetchAdaptsToAnOrderThatChanges) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group, {}, {.blocks = 4});
    // What is gathered in forward, up to and including the moment when layer `order[at]` computes.
    const auto gathered_by = [&](const std::vector<int>& order, std::size_t at) {
      log.take();
      std::vector<std::string> lines;
      rank.fsdp.begin_step();
      rank.tape.backward(rank.tape.region(rank.model.root, [&] {
        Tensor x = affine(rank.tape, rank.input(), rank.model.scale, nullptr);
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

// The owner of a borrowed weight is gathered when the borrower needs it, and reduced once, after
// the first use.
TEST(CollectiveOrder, AnOwnerIsReducedAfterAllWhoBorrow) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group);
    for (int step = 0; step < 3; ++step) {
      log.take();
      rank.fsdp.begin_step();
      auto& owner = *rank.model.layers[0];
      const auto nothing = [](const Tensor& y) { return y; };
      rank.tape.backward(rank.tape.region(rank.model.root, [&] {
        Tensor h = affine(rank.tape, rank.input(), rank.model.scale, nullptr);
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
TEST(CollectiveOrder, RepeatedBlocksFollowThePlanToo) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group);
    for (int step = 0; step < 3; ++step) {
      log.take();
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2, 0, 1, 2}));
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

// A block inside a recomputed one is visited again in backward: that is no new order of forward.
TEST(CollectiveOrder, AReplayOfNestedUnitsDoesNotCutTheRecordedOrder) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group, {.prefetch = 1}, {.blocks = 4});
    const auto layer = [&](const Tensor& x, std::size_t i) {
      auto& l = *rank.model.layers[i];
      return affine(rank.tape, x, l.weight, &l.bias);
    };
    const auto pass = [&] {
      return rank.tape.region(rank.model.root, [&] {
        Tensor x = affine(rank.tape, rank.input(), rank.model.scale, nullptr);
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

// The root's gradient is final when its last use is, though its region is still open.
TEST(CollectiveOrder, ARootThatIsUsedLastIsReducedFirst) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group);
    for (int step = 0; step < 2; ++step) {
      log.take();
      rank.fsdp.begin_step();
      rank.tape.backward(forward_to_head(rank.tape, rank.model, rank.input(), false));
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
TEST(CollectiveOrder, TheRootDoesNotCountAsGatheredAhead) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    ToyRank rank(group, {}, {.blocks = 2});
    rank.fsdp.begin_step();
    const Tensor first = forward(rank.tape, rank.model, rank.input(), {0, 1});
    const Tensor second = forward(rank.tape, rank.model, rank.input(), {0, 1});
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
TEST(CollectiveOrder, UnitsAreReducedAsTheirGradientsAreDone) {
  for (const auto& [strategy, unused] : {std::pair{"zero3", UnusedParameters::kZero},
                                         {"zero3", UnusedParameters::kSkip},
                                         {"ddp", UnusedParameters::kZero}}) {
    comm::run_ranks(2, {}, [&, strategy = strategy, unused = unused](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      ToyRank rank(group, {.placement = Placement::preset(strategy), .unused_parameters = unused});
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {2, 0}));
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

// Ranks call the collectives of a group in one order. Streams run at the same time, so a group
// is for one of them.
TEST(CollectiveOrder, GathersAndReductionsHaveGroupsOfTheirOwn) {
  for (const char* strategy : {"zero1", "zero2", "zero3", "hsdp", "hybrid_zero2", "hfsdp"}) {
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      ToyRank rank(group, {.placement = Placement::preset(strategy)});
      Sgd optimizer(rank.fsdp, {});
      log.take();  // before the first step: the plan, over compute
      for (int step = 0; step < 2; ++step) {
        rank.fsdp.begin_step();
        rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2}));
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
void observe(ToyRank& rank, const std::function<void(ToyModel::Layer&)>& in_forward,
             const std::function<void(ToyModel::Layer&)>& in_backward) {
  rank.fsdp.begin_step();
  rank.tape.backward(rank.tape.region(rank.model.root, [&] {
    Tensor x = affine(rank.tape, rank.input(), rank.model.scale, nullptr);
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

TEST(CollectiveOrder, PrefetchIsHowManyUnitsAreGatheredAhead) {
  constexpr int kBlocks = 5;
  for (const int prefetch : {0, 1, 2, 3}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      ToyRank rank(group, {.prefetch = prefetch}, {.blocks = kBlocks});
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
TEST(CollectiveOrder, WhatForwardNeedsFirstIsGatheredAfterTheUpdate) {
  for (const std::size_t prefetch : {0, 1, 2}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      ToyRank rank(group, {.prefetch = static_cast<int>(prefetch)});
      Sgd optimizer(rank.fsdp, {});
      rank.fsdp.begin_step();
      rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {1, 2, 0}));
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

// So the next unit's backward does not wait for the reduction of the one before.
TEST(CollectiveOrder, GradientsOfNeighboursLieInDifferentSlots) {
  for (const int reductions_in_flight : {1, 2}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, {.prefetch = 0, .reductions_in_flight = reductions_in_flight},
                   {.blocks = 4});
      std::vector<const std::byte*> slots;
      observe(
          rank, [](ToyModel::Layer&) {},
          [&](ToyModel::Layer& l) { slots.push_back(l.weight.grad.raw()); });
      ASSERT_EQ(slots.size(), 4u);
      for (std::size_t i = 1; i < slots.size(); ++i) EXPECT_NE(slots[i], slots[i - 1]) << i;
    });
  }
}

}  // namespace
}  // namespace tessera::shard
