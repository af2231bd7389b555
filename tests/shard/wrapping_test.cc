// Models of every shape can be wrapped: packed, nested, without blocks or a root, several at once,
// with a reducer of one's own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/elementwise.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "shard/reducer.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/usage_patterns.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::error_of;
using tessera::testing::forward;
using tessera::testing::has;
using tessera::testing::sum;
using tessera::testing::ToyModel;
using tessera::testing::ToyRank;

constexpr std::int64_t kNumel = testing::kPatternNumel;

TEST(FsdpUnits, ArePackedUntilLargeEnough) {
  const auto names = [](std::int64_t unit_min_numel, int num_blocks) {
    std::vector<std::string> result;
    comm::run_ranks(1, {}, [&](ProcessGroup& world) {
      const ToyRank rank(world, {.unit_min_numel = unit_min_numel}, {.blocks = num_blocks});
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
  const auto nested = [](ToyRank& rank, std::size_t depth) {
    const std::function<Tensor(Tensor, std::size_t)> at = [&](Tensor x, std::size_t i) -> Tensor {
      auto& l = *rank.model.layers[i];
      return rank.tape.region(l.block, [&] {
        const Tensor y = affine(rank.tape, x, l.weight, &l.bias);
        return i + 1 == depth ? y : affine(rank.tape, at(y, i + 1), l.weight, nullptr);
      });
    };
    return sum(rank.tape, at(rank.input(), 0));
  };
  const auto norm = [&](const FsdpOptions& options, std::size_t depth) {
    float result = 0;
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, options);
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
        ToyRank rank(world, {.placement = Placement::preset(strategy), .reducer = reducer});
        rank.fsdp.begin_step();
        rank.tape.backward(forward(rank.tape, rank.model, rank.input(), {0, 1, 2}));
        norms.push_back(rank.fsdp.finish_step().value());
      }
      EXPECT_EQ(norms[1], norms[0] / 2) << strategy;
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
      std::vector<std::unique_ptr<ToyRank>> models;
      for (int i = 0; i < count; ++i) {
        models.push_back(std::make_unique<ToyRank>(
            world, FsdpOptions{.seed = 1 + static_cast<std::uint64_t>(i),
                               .delay_seed = 5 + static_cast<std::uint64_t>(world.rank())}));
      }
      std::vector<float> norms;
      for (int step = 0; step < 3; ++step) {
        std::vector<Tensor> losses;
        for (const auto& m : models) {
          m->fsdp.begin_step();
          losses.push_back(forward(m->tape, m->model, m->input(), {0, 1, 2}));
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
