// Parameters that are frozen and set free in mid-run: bits are those of one process and of models
// that were wrapped so from the start.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Parameter;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::CollectiveLog;
using tessera::testing::error_of;
using tessera::testing::has;
using tessera::testing::LoggedGroup;
using tessera::testing::ToyModel;
using tessera::testing::ToyRank;

constexpr std::int64_t kNumel = 300;

struct Rank : ToyRank {
  explicit Rank(ProcessGroup& world, const FsdpOptions& options = {}, bool adamw = false,
                const std::function<void(ToyModel&)>& set = {})
      : ToyRank(world, options, {.numel = kNumel, .prepare = set}) {
    if (adamw) {
      optimizer = std::make_unique<AdamW>(fsdp, AdamWOptions{});
    } else {
      optimizer = std::make_unique<Sgd>(fsdp, SgdOptions{.momentum = 0.9});
    }
  }

  // Micro-batches are numbered over ranks, so that one process can have them all.
  float step(int number, int num_ranks, int rank, int accum) {
    for (int micro = 0; micro < accum; ++micro) {
      micro == 0 ? fsdp.begin_step(accum) : fsdp.next_micro_step();
      const engine::RandomStream random{
          7, static_cast<std::uint64_t>((number * accum + micro) * num_ranks + rank)};
      std::vector<float> values(kNumel);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {kNumel}, values)));
    }
    const float norm = fsdp.finish_step().value();
    optimizer->step(1e-2);
    return norm;
  }

  std::unique_ptr<Optimizer> optimizer;
};

// Which parameters are trainable in each of three phases.
void set_phase(ToyModel& model, int phase) {
  model.scale.trainable = phase != 1;
  model.layers[0]->weight.trainable = model.layers[0]->bias.trainable = phase == 2;
  model.layers[1]->weight.trainable = phase != 1;
  model.layers[2]->bias.trainable = phase != 2;
}

std::vector<float> values_of(Rank& rank) {
  std::vector<float> all;
  for (const Parameter* p : rank.fsdp.parameters()) {
    for (const float v : rank.fsdp.full_parameter(*p)) all.push_back(v);
    if (!p->trainable) continue;
    for (const std::string& name : rank.optimizer->state_names()) {
      for (const float v : rank.optimizer->full_state(*p, name)) all.push_back(v);
    }
  }
  return all;
}

// Six steps in three phases: norms, then parameters and states.
std::vector<float> train(int ranks, int accum, const FsdpOptions& options, bool adamw) {
  std::vector<float> result;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    Rank rank(world, options, adamw, [](ToyModel& model) { set_phase(model, 0); });
    std::vector<float> mine;
    for (int phase = 0; phase < 3; ++phase) {
      if (phase > 0) {
        set_phase(rank.model, phase);
        rank.fsdp.trainable_changed();
      }
      for (int step = 0; step < 2; ++step) {
        mine.push_back(rank.step(2 * phase + step, ranks, world.rank(), accum));
      }
    }
    for (const float v : values_of(rank)) mine.push_back(v);
    if (world.rank() == 0) result = mine;
  });
  return result;
}

TEST(Trainable, ChangesHaveTheBitsOfOneProcess) {
  for (const bool adamw : {false, true}) {
    const std::vector<float> expected = train(1, 6, {.placement = Placement::preset("ddp")}, adamw);
    for (const int ranks : {1, 2, 3}) {
      for (const std::string& strategy : Placement::preset_names()) {
        for (const int packing : {0, 100000}) {
          if (testing::kIsSlow && (packing > 0) != (ranks == 2)) continue;
          FsdpOptions options{.placement = Placement::preset(strategy),
                              .unit_min_numel = packing,
                              .delay_seed = static_cast<std::uint64_t>(packing)};
          if (packing > 0) {
            const bool moves = can_offload_parameters(options.placement, options.precision);
            options.offload = {.parameters = moves ? 0.4 : 0,
                               .gradients = 0.7,
                               .optimizer = adamw ? 0.5 : 1,
                               .threads = 2};
          }
          EXPECT_EQ(train(ranks, 6 / ranks, options, adamw), expected)
              << strategy << " ranks " << ranks << " packing " << packing;
        }
      }
    }
  }
}

// As if it were wrapped again, with values and states carried over: plan, bits and memory.
TEST(Trainable, ChangesEqualAModelThatIsWrappedSo) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        const FsdpOptions options{.placement = Placement::preset(strategy),
                                  .precision = {.param = dtype, .reduce = dtype}};
        Rank rank(world, options, false, [](ToyModel& m) { set_phase(m, 0); });
        for (int phase = 1; phase < 3; ++phase) {
          rank.step(phase, 2, world.rank(), 1);
          Rank fresh(world, options, false, [&](ToyModel& m) { set_phase(m, phase); });
          const auto was_trainable = [&, before = phase - 1](const std::string& name) {
            ToyModel other(3, kNumel);
            set_phase(other, before);
            for (Parameter* p : {&other.scale, &other.layers[0]->weight, &other.layers[0]->bias,
                                 &other.layers[1]->weight, &other.layers[1]->bias,
                                 &other.layers[2]->weight, &other.layers[2]->bias}) {
              if (p->name == name) return p->trainable;
            }
            return false;
          };
          const auto from = rank.fsdp.parameters(), to = fresh.fsdp.parameters();
          for (std::size_t i = 0; i < from.size(); ++i) {
            fresh.fsdp.load(*to[i], rank.fsdp.full_parameter(*from[i]));
            if (!to[i]->trainable || !was_trainable(to[i]->name)) continue;
            fresh.optimizer->load_state(*to[i], "velocity",
                                        rank.optimizer->full_state(*from[i], "velocity"));
          }
          fresh.fsdp.parameters_changed();
          set_phase(rank.model, phase);
          rank.fsdp.trainable_changed();
          EXPECT_EQ(rank.fsdp.plan(), fresh.fsdp.plan());
          EXPECT_EQ(values_of(rank), values_of(fresh)) << strategy;
          EXPECT_EQ(rank.step(9, 2, world.rank(), 1), fresh.step(9, 2, world.rank(), 1));
          EXPECT_EQ(values_of(rank), values_of(fresh)) << strategy;
          rank.fsdp.synchronize();
          fresh.fsdp.synchronize();
          EXPECT_EQ(rank.memory.stats().current_nbytes, fresh.memory.stats().current_nbytes);
        }
      });
    }
  }
}

TEST(Trainable, FrozenUnitsAreNeitherReducedNorUpdated) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    CollectiveLog log;
    LoggedGroup group(world, log);
    Rank rank(group);
    const auto reductions = [&] {
      log.take();
      rank.step(0, 2, world.rank(), 1);
      std::vector<std::string> lines;
      for (const std::string& line : log.take()) {
        if (line.starts_with("reduce")) lines.push_back(line);
      }
      return lines;
    };
    using Lines = std::vector<std::string>;
    const Lines all = {"reduce_scatter h.2 gradient", "reduce_scatter h.1 gradient",
                       "reduce_scatter h.0 gradient", "reduce_scatter root gradient"};
    EXPECT_EQ(reductions(), all);
    auto& layer = *rank.model.layers[1];
    layer.weight.trainable = layer.bias.trainable = false;
    rank.fsdp.trainable_changed();
    const std::vector<float> before = rank.fsdp.full_parameter(layer.weight);
    EXPECT_EQ(reductions(), (Lines{all[0], all[2], all[3]}));
    EXPECT_EQ(rank.fsdp.full_parameter(layer.weight), before);
    layer.weight.trainable = layer.bias.trainable = true;
    rank.fsdp.trainable_changed();
    EXPECT_EQ(reductions(), all);
    EXPECT_NE(rank.fsdp.full_parameter(layer.weight), before);
  });
}

// What was begun and given up leaves nothing behind.
TEST(Trainable, MayChangeAfterAStepThatWasGivenUp) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world), other(world);
    rank.fsdp.begin_step(2, {.no_sync = true});
    rank.tape.backward(rank.loss());
    rank.fsdp.cancel_step();
    for (Rank* r : {&rank, &other}) {
      r->model.layers[0]->weight.trainable = false;
      r->fsdp.trainable_changed();
      r->fsdp.synchronize();
    }
    EXPECT_EQ(rank.memory.stats().current_nbytes, other.memory.stats().current_nbytes);
    EXPECT_EQ(rank.step(0, 2, world.rank(), 1), other.step(0, 2, world.rank(), 1));
  });
}

TEST(TrainableErrors, SayWhatIsExpected) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    const auto error = [&] {
      return error_of<InvalidArgument>([&] { rank.fsdp.trainable_changed(); });
    };
    rank.fsdp.begin_step();
    EXPECT_TRUE(has(error(), {"[trainable_changed]", "got a step"}));
    rank.tape.backward(rank.loss());
    rank.fsdp.finish_step();
    EXPECT_TRUE(has(error(), {"[trainable_changed]", "gradients that wait"}));
    rank.optimizer->step(1e-3);
    rank.fsdp.trainable_changed();
    rank.optimizer->step_in_backward(1e-3);
    EXPECT_TRUE(has(error(), {"[trainable_changed]", "step_in_backward()"}));
  });
  std::vector<std::string> errors(2);
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    Rank rank(world);
    rank.model.layers[1]->bias.trainable = world.rank() == 0;
    errors[static_cast<std::size_t>(world.rank())] =
        error_of<InvalidArgument>([&] { rank.fsdp.trainable_changed(); });
  });
  for (const std::string& error : errors) {
    EXPECT_TRUE(has(error, {"rank 0 'h.1.bias is trainable'", "rank 1 'h.1.bias is frozen'"}));
  }
}

TEST(TrainableErrors, AChangeComesBeforeJoin) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    ASSERT_EQ(rank.fsdp.join(1), 1);
    rank.step(0, 2, world.rank(), 1);
    ASSERT_EQ(rank.fsdp.join(world.rank()), 1);
    rank.model.layers[1]->bias.trainable = false;
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.trainable_changed(); }),
                    {"[trainable_changed]", "join()"}));
  });
}

// As between two epochs.
TEST(Trainable, MayChangeWhenJoinHasSaidThatAllAreDone) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    ASSERT_EQ(rank.fsdp.join(1), 1);
    rank.step(0, 2, world.rank(), 1);
    ASSERT_EQ(rank.fsdp.join(0), 0);
    rank.model.layers[1]->bias.trainable = false;
    rank.fsdp.trainable_changed();
    ASSERT_EQ(rank.fsdp.join(1), 1);
    rank.step(1, 2, world.rank(), 1);
  });
}

// A rank without a batch would repeat a step in which other parameters were trained.
TEST(TrainableErrors, JoinNeedsABatchAfterAChange) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world);
    ASSERT_EQ(rank.fsdp.join(1), 1);
    rank.step(0, 2, world.rank(), 1);
    rank.model.layers[1]->bias.trainable = false;
    rank.fsdp.trainable_changed();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.join(world.rank()); }),
                    {"expected a batch on every rank", "rank 0"}));
  });
}

}  // namespace
}  // namespace tessera::shard
