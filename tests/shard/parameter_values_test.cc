// Values of parameters: they go in and out whole, a change reaches every copy, and what backward
// finds is what forward kept.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/usage_patterns.h"
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
using tessera::testing::sum;
using tessera::testing::ToyModel;
using tessera::testing::ToyRank;
using tessera::testing::train_pattern;

constexpr std::int64_t kNumel = testing::kPatternNumel;
using Training = testing::PatternTraining;

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
    ToyRank rank(group, {.placement = {.reshard_ranks = 2, .shard_ranks = 4}});
    const ProcessGroup* neighbours = rank.fsdp.mesh().reshard();
    ASSERT_NE(neighbours, nullptr);
    EXPECT_EQ(neighbours->size(), 2);
    EXPECT_EQ(neighbours->rank(), world.rank() % 2);
    rank.fsdp.begin_step();
    const Tensor loss = forward(rank.tape, rank.model, rank.input(), {0, 1, 2});
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

// Of a file each rank reads its own part, once, and nothing else.
TEST(FsdpParameters, LoadOwnedAsksForWhatTheRankOwns) {
  for (const char* strategy : {"zero3", "hsdp", "ddp"}) {
    const int copies = strategy[0] == 'd' ? 4 : strategy[0] == 'h' ? 2 : 1;
    std::vector<std::map<std::string, std::vector<int>>> asked(4);  // how often, by element
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, {.placement = Placement::preset(strategy)});
      for (const Parameter* p : rank.fsdp.parameters()) {
        std::vector<int>& times = asked[static_cast<std::size_t>(world.rank())][p->name];
        times.resize(static_cast<std::size_t>(rank.numel));
        rank.fsdp.load_owned(*p, [&](Range elements, std::span<float> out) {
          ASSERT_EQ(elements.numel, std::ssize(out));
          for (std::int64_t i = 0; i < elements.numel; ++i) {
            const std::int64_t element = elements.begin + i;
            ++times.at(static_cast<std::size_t>(element));
            out[static_cast<std::size_t>(i)] = static_cast<float>(element);
          }
        });
        std::vector<float> expected(static_cast<std::size_t>(rank.numel));
        std::iota(expected.begin(), expected.end(), 0.0f);
        EXPECT_EQ(rank.fsdp.full_parameter(*p), expected) << p->name;
      }
    });
    for (const auto& [name, first] : asked[0]) {
      for (std::size_t i = 0; i < first.size(); ++i) {
        int num = 0;
        for (auto& of_rank : asked) {
          EXPECT_LE(of_rank[name][i], 1);
          num += of_rank[name][i];
        }
        ASSERT_EQ(num, copies) << strategy << " " << name << " " << i;
      }
    }
  }
}

TEST(FsdpParameters, ChangesReachUnitsThatWerePrefetchedAndNotUsed) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    // Late on one rank: the gather is still reading when load() is called.
    ToyRank rank(world, {.delay_seed = world.rank() == 0 ? 0u : 5u});
    const auto evaluate = [&](const std::vector<int>& order) {
      return rank.tape.no_grad([&] { return forward(rank.tape, rank.model, rank.input(), order); })
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

// An update also reaches a unit that an evaluation between finish_step() and the update left
// halfway.
TEST(FsdpParameters, UpdatesReachAPackedUnitThatWasLeftHalfway) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    ToyRank rank(world, {.prefetch = 0, .unit_min_numel = 1000}, {.blocks = 2});
    Sgd optimizer(rank.fsdp, {});
    const auto layer = [&](const Tensor& x, std::size_t i) {
      auto& l = *rank.model.layers[i];
      return rank.tape.region(l.block, [&] { return affine(rank.tape, x, l.weight, &l.bias); });
    };
    rank.fsdp.begin_step();
    rank.tape.backward(sum(rank.tape, layer(layer(rank.input(), 0), 1)));
    rank.fsdp.finish_step();
    const auto evaluate = [&](std::size_t i) {
      return rank.tape.no_grad([&] { return sum(rank.tape, layer(rank.input(), i)); }).item();
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

TEST(FsdpParameters, OneRanksValuesBecomeThoseOfAll) {
  for (const char* strategy : {"zero3", "ddp", "zero1", "hfsdp"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, {.placement = Placement::preset(strategy)});
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

// Nobody updates them, so there is nothing to keep in f32 besides what is computed with.
TEST(FsdpParameters, FrozenOnesHaveNoMaster) {
  for (const char* strategy : {"zero3", "zero1", "ddp", "hfsdp"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      const auto nbytes = [&](bool freeze) {
        const Memory memory;
        const Stream compute = Stream::inline_cpu("compute");
        ToyModel model(1, 128);
        auto& l = *model.layers[0];
        l.weight.trainable = l.bias.trainable = !freeze;
        Placement placement = Placement::preset(strategy);
        placement.shard_ranks = Placement::kAllRanks;
        Fsdp fsdp(world, memory, compute, model.blocks(), nullptr,
                  {.placement = placement, .precision = {.param = DType::kBF16}});
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

}  // namespace
}  // namespace tessera::shard
