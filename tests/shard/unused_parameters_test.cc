// Parameters that a step does not use, on all ranks or on some. What comes out is what one process
// has.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/uneven_ranks.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Parameter;
using engine::Tensor;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::kSoon;
using testing::LoggedGroup;
using testing::ToyModel;
using testing::ToyRank;
using testing::UnevenRank;
using testing::with;

constexpr std::int64_t kNumel = 130;

// Which layers a batch goes through.
std::vector<int> layers_of(int batch) {
  return batch % 3 == 0   ? std::vector<int>{0, 1, 2, 3}
         : batch % 3 == 1 ? std::vector<int>{0, 3}
                          : std::vector<int>{2};
}

void run_through(UnevenRank& trainer, int batch, const std::vector<int>& layers) {
  const Tensor x = trainer.input(1.0f + float(batch));
  trainer.tape.backward(trainer.tape.region(trainer.model.root, [&] {
    Tensor h = testing::affine(trainer.tape, x, trainer.model.scale, nullptr);
    for (const int i : layers) {
      auto& l = *trainer.model.layers[static_cast<std::size_t>(i)];
      h = trainer.tape.region(l.block,
                              [&] { return testing::affine(trainer.tape, h, l.weight, &l.bias); });
    }
    return testing::sum(trainer.tape,
                        testing::affine(trainer.tape, h, trainer.model.scale, nullptr));
  }));
}

// Each micro-step of each rank leaves out other units.
TEST(Unused, RanksMayLeaveOutDifferentUnits) {
  const auto run = [](const std::string& strategy, int ranks, int accum) {
    std::vector<float> result;
    comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
      FsdpOptions options = with(strategy);
      options.unused_parameters = UnusedParameters::kSkip;
      UnevenRank trainer(world, options);
      for (int step = 0; step < 3; ++step) {
        trainer.fsdp.begin_step(accum);
        for (int micro = 0; micro < accum; ++micro) {
          if (micro > 0) trainer.fsdp.next_micro_step();
          const int batch = (step * accum + micro) * ranks + world.rank();
          run_through(trainer, batch, step == 2 ? std::vector<int>{1} : layers_of(batch));
        }
        trainer.update();
      }
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const std::vector<float> expected = run("ddp", 1, 8);
  for (const int ranks : {2, 4}) {
    for (const char* strategy : {"ddp", "zero1", "zero2", "hybrid_zero2"}) {
      EXPECT_EQ(run(strategy, ranks, 8 / ranks), expected) << strategy << " on " << ranks;
    }
  }
}

// Two steps: all layers, then only layer 1. What becomes of the others in the second?
TEST(Unused, ParametersAreLeftAloneOrHaveAGradientOfZero) {
  for (const std::string& strategy : Placement::preset_names()) {
    for (const auto unused : {UnusedParameters::kSkip, UnusedParameters::kZero}) {
      comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
        FsdpOptions options = with(strategy);
        options.unused_parameters = unused;
        UnevenRank trainer(world, options);
        trainer.fsdp.begin_step();
        run_through(trainer, 0, {0, 1, 2, 3});
        trainer.update();
        const bool skips = unused == UnusedParameters::kSkip;
        EXPECT_TRUE(has(
            error_of<engine::InvalidArgument>([&] { trainer.fsdp.is_unused(trainer.model.scale); }),
            {"between finish_step() and the optimizer", "scale"}));
        for (int step = 0; step < 2; ++step) {
          std::vector<std::vector<float>> before, velocity;
          for (const Parameter* p : trainer.fsdp.parameters()) {
            before.push_back(trainer.fsdp.full_parameter(*p));
            velocity.push_back(trainer.optimizer.full_state(*p, "velocity"));
          }
          trainer.fsdp.begin_step();
          run_through(trainer, 1, {1});
          const GradNorm norm = trainer.fsdp.finish_step();
          for (const Parameter* p : trainer.fsdp.parameters()) {
            const bool is_used = p->name.starts_with("h.1.") || p->name == "scale";
            if (skips) {
              EXPECT_EQ(trainer.fsdp.is_unused(*p), !is_used) << p->name;
            }
            if (is_used) continue;
            EXPECT_EQ(trainer.fsdp.full_gradient(*p), std::vector<float>(kNumel)) << p->name;
          }
          trainer.optimizer.step(1e-2, norm, 0);
          std::size_t i = 0;
          for (const Parameter* p : trainer.fsdp.parameters()) {
            const bool stays = skips && !p->name.starts_with("h.1.") && p->name != "scale";
            EXPECT_EQ(trainer.fsdp.full_parameter(*p) == before[i], stays) << p->name;
            EXPECT_EQ(trainer.optimizer.full_state(*p, "velocity") == velocity[i], stays)
                << p->name;
            ++i;
          }
        }
        // Used again, it learns again.
        const std::vector<float> before =
            trainer.fsdp.full_parameter(trainer.model.layers[0]->bias);
        trainer.fsdp.begin_step();
        run_through(trainer, 0, {0, 1, 2, 3});
        trainer.update();
        EXPECT_NE(trainer.fsdp.full_parameter(trainer.model.layers[0]->bias), before);
      });
    }
  }
}

// The order of reductions is one that no rank's own program decides, and still goes on during
// backward: what a rank leaves out holds nothing up.
TEST(Unused, UnitsAreReducedInTheDeclaredOrderBackwards) {
  std::vector<std::vector<std::string>> lines(2);
  comm::run_ranks(2, kSoon, [&](ProcessGroup& group) {
    CollectiveLog log;
    LoggedGroup world(group, log);
    UnevenRank trainer(world, {.placement = Placement::preset("ddp"),
                               .unused_parameters = UnusedParameters::kSkip});
    log.take();
    trainer.fsdp.begin_step();
    trainer.tape.no_grad([&] {  // uses all of them, and no backward comes of it
      return trainer.loss();
    });
    run_through(trainer, 1, world.rank() == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{3});
    if (world.rank() == 0) {
      EXPECT_EQ(log.take().size(), 5u) << "all of them before the step ends";
    }
    trainer.fsdp.finish_step();
    lines[static_cast<std::size_t>(world.rank())] = log.take();
  });
  ASSERT_GE(lines[1].size(), 5u);
  const char* const expected[] = {"h.3", "h.2", "h.1", "h.0", "root"};
  for (std::size_t i = 0; i < 5; ++i) EXPECT_TRUE(has(lines[1][i], {"all_reduce", expected[i]}));
}

// A unit that the first backward leaves out may come with the second: it is not final before. The
// reference cuts parameters, so that each unit is reduced on its own.
TEST(Unused, UnitsMayComeWithALaterBackward) {
  const auto run = [](const std::string& strategy, int ranks) {
    std::vector<float> result;
    comm::run_ranks(ranks, kSoon, [&](ProcessGroup& world) {
      FsdpOptions options = with(strategy);
      options.unused_parameters = UnusedParameters::kSkip;
      UnevenRank trainer(world, options);
      const int accum = 4 / ranks;
      trainer.fsdp.begin_step(accum, {.num_backwards = 2});
      for (int micro = 0; micro < accum; ++micro) {
        if (micro > 0) trainer.fsdp.next_micro_step({.num_backwards = 2});
        const int batch = micro * ranks + world.rank();
        run_through(trainer, batch, {0});
        run_through(trainer, batch, batch == 1 ? std::vector<int>{0} : std::vector<int>{1, 2});
      }
      trainer.update();
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const std::vector<float> expected = run("zero3", 1);
  for (const int ranks : {1, 2, 4}) {
    for (const char* strategy : {"ddp", "zero1", "zero2"}) {
      EXPECT_EQ(run(strategy, ranks), expected) << strategy << " on " << ranks;
    }
  }
}

// Nor is a unit whose backward comes when the region around it is recomputed.
TEST(Unused, UnitsInRecomputedRegionsAreUsed) {
  const auto run = [](const std::string& strategy) {
    std::vector<float> result;
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      FsdpOptions options = with(strategy);
      options.unused_parameters = UnusedParameters::kSkip;
      UnevenRank trainer(world, options);
      trainer.fsdp.begin_step();
      trainer.tape.backward(trainer.tape.region(trainer.model.root, [&] {
        const Tensor x = trainer.input(1.5f);
        const auto layer = [&trainer](std::size_t i, const Tensor& in) {
          auto& l = *trainer.model.layers[i];
          return testing::affine(trainer.tape, in, l.weight, &l.bias);
        };
        const auto region = [&trainer, layer](std::size_t i, const Tensor& in) {
          return trainer.tape.region(trainer.model.layers[i]->block, [=] { return layer(i, in); });
        };
        const Tensor h =
            trainer.tape.region(trainer.model.layers[0]->block,
                                [=] { return region(1, layer(0, x)); }, {.recompute = true});
        return testing::sum(trainer.tape, region(3, h));
      }));
      trainer.update();
      const std::vector<float> mine = trainer.take();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const std::vector<float> expected = run("zero3");
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    EXPECT_EQ(run(strategy), expected) << strategy;
  }
}

// Nor is its gradient complete while a visit is to come that uses none of its parameters.
TEST(Unused, AVisitWithoutUsesIsWaitedFor) {
  for (const char* strategy : {"zero3", "ddp"}) {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& group) {
      CollectiveLog log;
      LoggedGroup world(group, log);
      UnevenRank trainer(world, with(strategy));
      log.take();
      trainer.fsdp.begin_step();
      trainer.tape.backward(trainer.tape.region(trainer.model.root, [&] {
        auto& l = *trainer.model.layers[0];
        const Tensor x = trainer.input(1.5f);
        const Tensor h = trainer.tape.region(l.block, [&] {
          return testing::affine(trainer.tape, x, trainer.model.scale, nullptr);
        });
        return testing::sum(trainer.tape, trainer.tape.region(l.block, [&] {
          return testing::affine(trainer.tape, h, l.weight, &l.bias);
        }));
      }));
      trainer.fsdp.finish_step();
      int num_reductions = 0;
      for (const std::string& line : log.take()) {
        num_reductions += has(line, {"reduce", "h.0"}) ? 1 : 0;
      }
      EXPECT_EQ(num_reductions, 1) << strategy;
    });
  }
}

// As when only a head of one's own is trained, outside of what is wrapped.
TEST(Unused, AModelThatIsFrozenAsAWholeHasNoneToSkip) {
  for (const char* strategy : {"ddp", "zero3"}) {
    comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
      FsdpOptions options = with(strategy);
      options.unused_parameters = UnusedParameters::kSkip;
      ToyRank rank(world, options, {.blocks = 2, .prepare = [](ToyModel& model) {
                                      model.scale.trainable = false;
                                      for (const auto& l : model.layers) {
                                        l->weight.trainable = l->bias.trainable = false;
                                      }
                                    }});
      for (int step = 0; step < 2; ++step) {
        rank.fsdp.begin_step();
        rank.evaluate();
        EXPECT_EQ(rank.fsdp.finish_step().value(), 0);
        EXPECT_FALSE(rank.fsdp.is_unused(rank.model.scale));
      }
    });
  }
}

TEST(Unused, PlansThatDifferAreRefused) {
  std::string error;
  comm::run_ranks(2, kSoon, [&](ProcessGroup& world) {
    FsdpOptions options = with("ddp");
    if (world.rank() == 1) options.unused_parameters = UnusedParameters::kSkip;
    const std::string mine =
        error_of<engine::InvalidArgument>([&] { const UnevenRank trainer(world, options); });
    if (world.rank() == 0) error = mine;
  });
  EXPECT_TRUE(has(error, {"unused_parameters zero", "unused_parameters skipped"}));
}

}  // namespace
}  // namespace tessera::shard
