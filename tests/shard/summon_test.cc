// Whole parameters between steps: what is given, what is written back, and what is refused.
#include "shard/summon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/elementwise.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::error_of;
using tessera::testing::has;
using tessera::testing::ToyModel;
using tessera::testing::ToyRank;

constexpr std::int64_t kNumel = 130;

struct Rank : ToyRank {
  using ToyRank::ToyRank;
  float step(Sgd& optimizer) {
    fsdp.begin_step();
    tape.backward(loss());
    const float norm = fsdp.finish_step().value();
    optimizer.step(1e-2);
    return norm;
  }
};

FsdpOptions options_of(const std::string& strategy, DType param = DType::kF32) {
  return {.placement = Placement::preset(strategy), .precision = {.param = param}};
}

// Bits that bf16 does not have.
float edited(float value) { return value * 0.5f + 1.00390625f; }

TEST(Summon, GivesMastersAndWritesThemBack) {
  for (const int ranks : {1, 4}) {
    for (const std::string& strategy : Placement::preset_names()) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
          FsdpOptions options = options_of(strategy, dtype);
          if (can_offload_parameters(options.placement, options.precision)) {
            options.offload = {.parameters = 0.7, .optimizer = 0.5};
          }
          Rank rank(world, options), other(world, options_of(strategy, dtype));
          Sgd optimizer(rank.fsdp, {.momentum = 0.5}), others(other.fsdp, {.momentum = 0.5});
          rank.step(optimizer);
          other.step(others);
          Parameter& bias = rank.model.layers[1]->bias;
          Parameter& scale = rank.model.scale;
          std::vector<std::vector<float>> before = {rank.fsdp.full_parameter(bias),
                                                    rank.fsdp.full_parameter(scale)};
          const auto edit = [&](const std::vector<Tensor>& whole) {
            ASSERT_EQ(whole.size(), 2u);
            for (std::size_t i = 0; i < 2; ++i) {
              EXPECT_EQ(engine::to_vector<float>(whole[i]), before[i]);
              for (float& value : whole[i].span<float>()) value = edited(value);
            }
          };
          summon(rank.fsdp, {&bias, &scale}, edit);
          EXPECT_EQ(rank.fsdp.full_parameter(bias), before[0]) << "not written back";
          summon(rank.fsdp, {&bias, &scale}, edit, {.write_back = true});
          for (auto& values : before) {
            for (float& value : values) value = edited(value);
          }
          EXPECT_EQ(rank.fsdp.full_parameter(bias), before[0]);
          EXPECT_EQ(rank.fsdp.full_parameter(scale), before[1]);
          // What is computed with has changed as well.
          other.fsdp.load(other.model.layers[1]->bias, before[0]);
          other.fsdp.load(other.model.scale, before[1]);
          other.fsdp.parameters_changed();
          EXPECT_EQ(rank.evaluate(), other.evaluate());
          EXPECT_EQ(rank.step(optimizer), other.step(others)) << strategy;
        });
      }
    }
  }
}

// Edits that are launched are waited for, wherever that stream works.
TEST(Summon, TakesEditsThatAreWorkOfAStream) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::worker_cpu("compute", {.delay_seed = 3});
    ToyModel model(2, kNumel);
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, {});
    summon(fsdp, {&model.scale},
           [&](const std::vector<Tensor>& whole) {
             for (int i = 0; i < 20; ++i) engine::launch_set(compute, whole[0], 5, "edit");
           },
           {.write_back = true});
    EXPECT_EQ(fsdp.full_parameter(model.scale), std::vector<float>(kNumel, 5.0f));
  });
}

TEST(Summon, OfOneRankTakesItsEdits) {
  for (const std::string& strategy : Placement::preset_names()) {
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      Rank rank(world, options_of(strategy));
      bool is_called = false;
      summon(rank.fsdp, {&rank.model.scale},
             [&](const std::vector<Tensor>& whole) {
               is_called = true;
               for (float& value : whole[0].span<float>()) value = 7;
             },
             {.write_back = true, .only_rank = 1});
      EXPECT_EQ(is_called, world.rank() == 1);
      EXPECT_EQ(rank.fsdp.full_parameter(rank.model.scale), std::vector<float>(kNumel, 7));
    });
  }
}

// One unit's worth is there at a time, and gone afterwards.
TEST(Summon, TakesTheMemoryOfWhatIsNamed) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    const auto c = static_cast<std::size_t>(engine::Category::kWorkspace);
    rank.memory.reset_peaks();
    for (const Parameter* p : rank.fsdp.parameters()) {
      summon(rank.fsdp, {p}, [](const std::vector<Tensor>&) {});
    }
    EXPECT_EQ(rank.memory.stats().peak_nbytes[c], 4 * kNumel);
    EXPECT_EQ(rank.memory.stats().current_nbytes[c], 0);
  });
}

TEST(SummonErrors, EditsThatDifferAreNamedByEveryRank) {
  for (const std::string& strategy : Placement::preset_names()) {
    std::vector<std::string> errors(4);
    comm::run_ranks(4, {}, [&](ProcessGroup& world) {
      Rank rank(world, options_of(strategy));
      Parameter& bias = rank.model.layers[1]->bias;
      const std::vector<float> before = rank.fsdp.full_parameter(bias);
      errors[static_cast<std::size_t>(world.rank())] = error_of<InvalidArgument>([&] {
        summon(rank.fsdp, {&rank.model.scale, &bias},
               [&](const std::vector<Tensor>& whole) {
                 if (world.rank() == 2) whole[1].span<float>()[3] += 1;
               },
               {.write_back = true});
      });
      EXPECT_EQ(rank.fsdp.full_parameter(bias), before);
    });
    for (const std::string& error : errors) {
      EXPECT_TRUE(has(error, {"[summon]", "rank 2", "rank 0", "h.1.bias"}));
    }
  }
}

TEST(SummonErrors, WhatIsInUseIsRefused) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    Sgd optimizer(rank.fsdp, {});
    const auto nothing = [](const std::vector<Tensor>&) {};
    const auto error = [&] {
      return error_of<InvalidArgument>([&] { summon(rank.fsdp, {&rank.model.scale}, nothing); });
    };
    auto& layer = *rank.model.layers[1];
    std::string inside;
    rank.tape.no_grad([&] {
      return rank.tape.region(layer.block, [&] {
        inside = error();
        return affine(rank.tape, rank.input(), layer.weight, &layer.bias);
      });
    });
    EXPECT_TRUE(has(inside, {"[summon]", "open region", "h.1"}));
    summon(rank.fsdp, {&rank.model.scale}, nothing);  // after the region
    rank.fsdp.begin_step();
    EXPECT_TRUE(has(error(), {"[summon]", "got a step"}));
    rank.tape.backward(rank.loss());
    rank.fsdp.finish_step();
    summon(rank.fsdp, {&rank.model.scale}, nothing);  // after the step
    const auto inner = [&](auto fn) {
      std::string message;
      summon(rank.fsdp, {&rank.model.scale},
             [&](const std::vector<Tensor>&) { message = error_of<InvalidArgument>(fn); },
             {.write_back = true});
      return message;
    };
    EXPECT_TRUE(has(inner([&] { optimizer.step(1); }), {"an update", "summon()"}));
    EXPECT_TRUE(has(inner([&] { rank.fsdp.begin_step(); }), {"begin_step()", "summon()"}));
    EXPECT_TRUE(has(inner([&] { summon(rank.fsdp, {}, nothing); }), {"[fsdp]", "summon()"}));
    const Parameter stranger{.name = "stranger", .shape = {1}};
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { summon(rank.fsdp, {&stranger}, nothing); }),
                    {"stranger"}));
    EXPECT_TRUE(
        has(error_of<InvalidArgument>([&] { summon(rank.fsdp, {}, nothing, {.only_rank = 2}); }),
            {"below 2", "got 2"}));
  });
}

TEST(SummonErrors, NothingIsWrittenAfterAnException) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    Rank rank(world);
    const std::vector<float> before = rank.fsdp.full_parameter(rank.model.scale);
    EXPECT_THROW(summon(rank.fsdp, {&rank.model.scale},
                        [](const std::vector<Tensor>& whole) {
                          whole[0].span<float>()[0] = 5;
                          throw std::runtime_error("no");
                        },
                        {.write_back = true}),
                 std::runtime_error);
    EXPECT_EQ(rank.fsdp.full_parameter(rank.model.scale), before);
    rank.fsdp.begin_step();  // and nothing is held
  });
}

}  // namespace
}  // namespace tessera::shard
