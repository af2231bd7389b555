// Units that stay gathered around many forwards: the values of forwards without it, no collectives
// in the loop, ranks that make different numbers of forwards, memory that is given back, and what
// is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/memory.h"
#include "engine/parameter.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/uneven_ranks.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Category;
using engine::CommError;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;
using engine::Tensor;
using testing::affine;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::kSoon;
using testing::LoggedGroup;
using testing::ToyModel;
using testing::ToyRank;
using testing::ToySetup;

using Floats = std::vector<float>;
using Lines = std::vector<std::string>;

constexpr int kBlocks = 5;

struct Rank : ToyRank {
  Rank(ProcessGroup& world, const FsdpOptions& options, const ToySetup& setup = {.blocks = kBlocks})
      : ToyRank(world, options, setup), num_ranks(world.size()), rank(world.rank()) {}

  void step(float x) {
    fsdp.begin_step();
    tape.backward(loss(x + static_cast<float>(rank) / static_cast<float>(num_ranks)));
    const GradNorm norm = fsdp.finish_step();
    optimizer.step(1e-2, norm, /*max_norm=*/1);
  }
  float evaluate(float x) {
    const Tensor y = tape.no_grad([&] { return loss(x); });
    compute.synchronize();
    return y.item();
  }
  // `count` forwards, of which each depends on the one before, as tokens that are drawn do.
  Floats chain(int count) {
    Floats all;
    float x = 1;
    for (int i = 0; i < count; ++i) {
      all.push_back(evaluate(x));
      x = 0.5f + 0.01f * all.back();
    }
    return all;
  }
  std::int64_t nbytes(Category category = Category::kGatheredParameter) const {
    return memory.stats().current_nbytes[static_cast<std::size_t>(category)];
  }

  int num_ranks, rank;
  Sgd optimizer{fsdp, {.momentum = 0.9}};
};

FsdpOptions options_of(const std::string& strategy, DType param = DType::kF32) {
  return {.placement = Placement::preset(strategy), .precision = {.param = param}};
}

bool is_cut(const Rank& rank) { return rank.fsdp.options().placement.parameters != Place::kWhole; }

// Gathers of units, and the values of both ways, between steps that gather ahead.
void expect_forwards_of_before(ProcessGroup& ranks, const FsdpOptions& options,
                               const ToySetup& setup, const std::string& where) {
  constexpr int kForwards = 3;
  CollectiveLog log;
  LoggedGroup world(ranks, log);
  Rank kept(world, options, setup);
  Rank plain(ranks, options, setup);
  for (const float x : {1.0f, 2.0f}) {
    kept.step(x);
    plain.step(x);
    const std::int64_t held = kept.nbytes();
    log.take();
    Floats values;
    kept.fsdp.keep_gathered([&] {
      const auto is_ahead = [](const std::string& line) { return line.ends_with("keep_gathered"); };
      const Lines before = log.take();
      EXPECT_TRUE(std::ranges::all_of(before, is_ahead)) << where;
      EXPECT_LE(before.size(), kept.fsdp.units().size()) << where;
      values = kept.chain(kForwards);
      EXPECT_EQ(log.take(), Lines()) << where;
    });
    EXPECT_EQ(log.take(), Lines()) << where;
    EXPECT_EQ(kept.nbytes(), held) << where;
    EXPECT_EQ(values, plain.chain(kForwards)) << where;
  }
  EXPECT_EQ(kept.values(&kept.optimizer), plain.values(&plain.optimizer)) << where;
}

TEST(KeepGathered, ForwardsHaveTheirValuesAndSendNothing) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const std::string& strategy : Placement::preset_names()) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const double offload : {0.0, 0.5}) {
          FsdpOptions options = options_of(strategy, dtype);
          options.prefetch = ranks - 1;
          options.offload = {.parameters = 0, .gradients = offload, .optimizer = offload};
          if (can_offload_parameters(options.placement, options.precision)) {
            options.offload.parameters = offload;
          }
          comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
            expect_forwards_of_before(
                world, options, {.blocks = kBlocks},
                fmt::format("{} ranks {} {} offload {}", ranks, strategy, name_of(dtype), offload));
          });
        }
      }
    }
  }
}

// Delays, and memory without poison, which waits for the last use of memory.
TEST(KeepGathered, WaitsForGathersAndForTheirUse) {
  for (const char* strategy : {"zero3", "hfsdp", "shard_grad_op"}) {
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      comm::run_ranks(3, {}, [&](ProcessGroup& world) {
        FsdpOptions options = options_of(strategy);
        const std::uint64_t own = 10 * seed + static_cast<std::uint64_t>(world.rank());
        options.delay_seed = 100 + own;
        const auto compute = Stream::worker_cpu("compute", {.delay_seed = 200 + own});
        expect_forwards_of_before(world, options,
                                  {.blocks = kBlocks, .poison = seed % 2 == 0, .compute = compute},
                                  fmt::format("{} seed {}", strategy, seed));
      });
    }
  }
}

// Without a root, packed, and with kept parts.
TEST(KeepGathered, OfUnitsOfOtherShapes) {
  for (const char* strategy : {"zero3", "hfsdp"}) {
    for (const bool has_root : {true, false}) {
      for (const std::int64_t unit_min_numel : {0, 600}) {
        comm::run_ranks(4, {}, [&](ProcessGroup& world) {
          FsdpOptions options = options_of(strategy);
          options.unit_min_numel = unit_min_numel;
          if (strategy == std::string("zero3")) options.placement.reshard_ranks = 2;
          if (!has_root) {
            options.ignores = [](const engine::Parameter& p) { return p.name == "scale"; };
          }
          ToySetup setup{.blocks = kBlocks, .has_root = has_root};
          if (!has_root) {
            setup.prepare = [memory = Memory()](ToyModel& model) {
              model.scale.trainable = false;
              engine::materialize({&model.scale}, memory, 3);
            };
          }
          expect_forwards_of_before(
              world, options, setup,
              fmt::format("{} root {} units of {}", strategy, has_root, unit_min_numel));
        });
      }
    }
  }
}

TEST(KeepGathered, RanksMayMakeDifferentNumbersOfForwards) {
  for (const std::string& strategy : Placement::preset_names()) {
    comm::run_ranks(4, kSoon, [&](ProcessGroup& world) {
      Rank rank(world, options_of(strategy, DType::kBF16));
      Rank one(world, options_of("ddp", DType::kBF16));
      Floats values;
      rank.fsdp.keep_gathered([&] {
        values = rank.chain(world.rank() == 2 ? 0 : 3 + 2 * world.rank());
        // What was written is renewed by the next forward, or at the end where there is none.
        for (Rank* r : {&rank, &one}) {
          for (const engine::Parameter* p : r->fsdp.parameters()) {
            r->fsdp.load(*p, Floats(static_cast<std::size_t>(p->shape.numel()), 0.25f));
          }
        }
        const Floats more = rank.chain(world.rank());
        values.insert(values.end(), more.begin(), more.end());
      });
      const float last = rank.evaluate(1);
      const float loaded = one.evaluate(1);
      EXPECT_EQ(last, loaded) << strategy;
      const auto num_later = static_cast<std::size_t>(world.rank());
      EXPECT_TRUE(num_later == 0 || values[values.size() - num_later] == loaded) << strategy;
      rank.step(1);
    });
  }
}

// What docs/inference.md says of it.
TEST(KeepGathered, WithoutItDifferentNumbersAreAnError) {
  for (const char* strategy : {"zero3", "ddp"}) {
    Lines errors(2);
    const auto run = [&] {
      comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
        Rank rank(world, options_of(strategy));
        std::string& error = errors[static_cast<std::size_t>(world.rank())];
        try {
          rank.chain(world.rank() == 0 ? 3 : 5);
          rank.step(1);
        } catch (const CommError& e) {
          error = e.what();
          throw;
        }
      });
    };
    if (strategy == std::string("ddp")) {
      run();
      continue;
    }
    EXPECT_NE(error_of<CommError>(run), "");
    for (const std::string& error : errors) {
      EXPECT_TRUE(has(error, {"rank 0", "rank 1", "micro-step 1 of 1", "root forward"})) << error;
    }
  }
}

TEST(KeepGathered, IsCalledByAllRanksOrAnError) {
  for (const char* strategy : {"zero3", "ddp"}) {
    const std::string error = error_of<CommError>([&] {
      comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
        Rank rank(world, options_of(strategy));
        if (world.rank() == 1) rank.fsdp.keep_gathered([] {});
        rank.step(1);
        rank.fsdp.synchronize();
      });
    });
    EXPECT_TRUE(has(error, {"keep_gathered"})) << strategy << ": " << error;
  }
}

// A whole model, in what is computed with; slots count as long as there are units for them.
TEST(KeepGathered, TakesTheMemoryOfAWholeModelAndGivesItBack) {
  for (const std::string& strategy : Placement::preset_names()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const char* ends : {"returns", "throws", "throws in a region"}) {
        comm::run_ranks(4, {}, [&](ProcessGroup& world) {
          const std::string where = fmt::format("{} {} {}", strategy, name_of(dtype), ends);
          Rank rank(world, options_of(strategy, dtype));
          rank.step(1);
          const float before = rank.evaluate(1);
          std::int64_t whole = 0;
          for (const auto& unit : rank.fsdp.units()) whole += unit->gathered_nbytes();
          const std::int64_t held = rank.nbytes(), total = rank.memory.stats().total_nbytes;
          const auto use = [&] {
            rank.fsdp.keep_gathered([&] {
              // Parts that stay after a recorded forward have memory of their own.
              const std::int64_t kept_parts = is_cut(rank) ? 0 : held;
              EXPECT_EQ(rank.nbytes() - kept_parts, whole) << where;
              rank.chain(2);
              EXPECT_EQ(rank.nbytes() - kept_parts, whole) << where;
              if (ends == std::string("throws")) throw std::runtime_error("enough");
              if (ends == std::string("returns")) return;
              auto& layer = *rank.model.layers[1];
              rank.tape.no_grad([&] {
                return rank.tape.region(layer.block,
                                        [&]() -> Tensor { throw std::runtime_error("enough"); });
              });
            });
          };
          if (ends == std::string("returns")) {
            use();
          } else {
            EXPECT_EQ(error_of<std::runtime_error>(use), "enough") << where;
          }
          EXPECT_EQ(rank.nbytes(), held) << where;
          EXPECT_EQ(rank.memory.stats().total_nbytes, total) << where;
          EXPECT_EQ(rank.evaluate(1), before) << where;
          rank.fsdp.keep_gathered([&] { EXPECT_EQ(rank.evaluate(1), before) << where; });
          rank.step(2);
        });
      }
    }
  }
}

TEST(KeepGathered, WithoutRoomForAWholeModelIsAnErrorAndNothingElse) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    constexpr std::int64_t kNumel = 1024;
    const auto compute = Stream::inline_cpu("compute");
    const Memory memory(compute, {.limit_nbytes = 220 * kNumel});  // 291 would do
    engine::Tape tape(memory, compute);
    ToyModel model(16, kNumel);
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options_of("zero3"));
    const Tensor x = Tensor::from<float>(memory, {kNumel}, Floats(kNumel, 1), "x");
    const auto evaluate = [&] { return tape.no_grad([&] { return model.loss(tape, x); }).item(); };
    const float value = evaluate();
    const std::int64_t held = memory.stats().total_nbytes;
    for (int i = 0; i < 2; ++i) {
      const std::string error =
          error_of<engine::DeviceError>([&] { fsdp.keep_gathered([] { FAIL(); }); });
      EXPECT_TRUE(has(error, {"gathered_parameter", "parameter_slot"})) << error;
      EXPECT_EQ(memory.stats().total_nbytes, held);
      EXPECT_EQ(evaluate(), value);
    }
  });
}

TEST(KeepGathered, InsideAnotherCallsAndNothingElse) {
  comm::run_ranks(2, {}, [&](ProcessGroup& ranks) {
    CollectiveLog log;
    LoggedGroup world(ranks, log);
    Rank rank(world, options_of("zero3"));
    const float value = rank.evaluate(1);
    rank.fsdp.keep_gathered([&] {
      log.take();
      rank.fsdp.keep_gathered([&] { EXPECT_EQ(rank.evaluate(1), value); });
      EXPECT_EQ(rank.evaluate(1), value);
      EXPECT_EQ(log.take(), Lines());
    });
    rank.evaluate(1);
    EXPECT_FALSE(log.take().empty());
  });
}

TEST(KeepGathered, IsRefusedWhereValuesWouldBeMixed) {
  for (const std::string& strategy : Placement::preset_names()) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      Rank rank(world, options_of(strategy));
      const auto inside = [&](const auto& fn) {
        return error_of<InvalidArgument>([&] { rank.fsdp.keep_gathered(fn); });
      };
      const float value = rank.evaluate(1);
      EXPECT_TRUE(has(inside([&] { rank.loss(); }), {"tape.no_grad()", "keep_gathered()", "root"}));
      rank.tape.clear();
      EXPECT_TRUE(has(inside([&] { rank.fsdp.begin_step(); }), {"begin_step()", "inside"}));
      EXPECT_TRUE(
          has(inside([&] { rank.fsdp.trainable_changed(); }), {"trainable_changed()", "inside"}));
      auto& layer = *rank.model.layers[1];
      std::string open;
      rank.tape.no_grad([&] {
        return rank.tape.region(layer.block, [&] {
          open = inside([] { FAIL(); });
          return affine(rank.tape, rank.input(), layer.weight, &layer.bias);
        });
      });
      EXPECT_TRUE(has(open, {"open region", "h.1"})) << open;
      EXPECT_EQ(rank.evaluate(1), value) << strategy;
      rank.fsdp.begin_step();
      const Tensor loss = rank.loss();
      EXPECT_TRUE(has(inside([] { FAIL(); }), {"[keep_gathered]", "finish_step()", "a step"}));
      rank.tape.backward(loss);
      EXPECT_TRUE(has(inside([] { FAIL(); }), {"[keep_gathered]", "finish_step()", "a step"}));
      const GradNorm norm = rank.fsdp.finish_step();
      EXPECT_TRUE(has(inside([&] { rank.optimizer.step(1e-2); }), {"an update", "inside"}));
      // Between the gradients and their update.
      rank.fsdp.keep_gathered([&] { EXPECT_EQ(rank.evaluate(1), value); });
      rank.optimizer.step(1e-2, norm, 1);
      EXPECT_NE(rank.evaluate(1), value) << strategy;
    });
  }
}

}  // namespace
}  // namespace tessera::shard
