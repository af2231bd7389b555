// Several optimizers of one Fsdp, each of parameters of its own: one that needs whole matrices, and
// AdamW for the rest.
#include "shard/optimizer/step_together.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "examples/spectral_sign.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/optimizer/adamw.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Parameter;
using engine::Tensor;
using testing::error_of;
using testing::has;

constexpr int kMicroBatches = 4;

bool is_matrix(const Parameter& p) { return p.shape.rank() == 2; }
bool is_vector(const Parameter& p) { return !is_matrix(p); }

FsdpOptions options_of(const std::string& strategy) {
  return {.placement = Placement::preset(strategy)};
}

// One rank with three blocks of a matrix and a vector each, and a vector of the root.
struct Rank : testing::ToyRank {
  Rank(ProcessGroup& world, const FsdpOptions& options)
      : ToyRank(world, options,
                {.prepare =
                     [](testing::ToyModel& model) {
                       for (const auto& layer : model.layers) layer->weight.shape = {2, 65};
                     }}),
        world(world) {}

  GradNorm gradients(int step, float scale = 1) {
    const int accum = kMicroBatches / world.size();
    for (int micro = 0; micro < accum; ++micro) {
      micro == 0 ? fsdp.begin_step(accum) : fsdp.next_micro_step();
      const int number = (step * accum + micro) * world.size() + world.rank();
      const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
      tape.backward(loss(scale * random.normal(0)));
    }
    return fsdp.finish_step();
  }

  ProcessGroup& world;
};

struct Both : Rank {
  Both(ProcessGroup& world, const FsdpOptions& options) : Rank(world, options) {}

  void step(const GradNorm& norm) {
    step_together({{&matrices, 0.02}, {&rest, 0.003}}, norm, /*max_norm=*/0.5);
  }
  void train(int from, int to) {
    for (int number = from; number < to; ++number) step(gradients(number));
  }
  std::vector<float> all() {
    std::vector<float> all = values();
    const auto add = [&](const std::vector<float>& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    for (const Parameter* p : fsdp.parameters()) {
      if (is_matrix(*p)) {
        add(matrices.full_state(*p, "momentum"));
      } else {
        for (const char* state : {"m", "v"}) add(rest.full_state(*p, state));
      }
    }
    add({static_cast<float>(matrices.num_steps()), static_cast<float>(rest.num_steps())});
    return all;
  }
  std::vector<CheckpointPart> parts() { return {{&fsdp, {&matrices, &rest}}}; }

  SpectralSign matrices{fsdp, 0.75f, is_matrix};
  AdamW rest{fsdp, {.weight_decay = 0, .updates = is_vector}};
};

void on_ranks(int ranks, const FsdpOptions& options, const std::function<void(Both&)>& fn) {
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    Both both(world, options);
    fn(both);
  });
}

std::vector<float> train(int ranks, const FsdpOptions& options) {
  std::vector<float> values;
  on_ranks(ranks, options, [&](Both& both) {
    both.train(0, 3);
    const std::vector<float> mine = both.all();
    if (both.world.rank() + 1 == ranks) values = mine;
  });
  return values;
}

TEST(StepTogether, HasTheSameBitsForEveryStrategyAndNumberOfRanks) {
  const std::vector<float> expected = train(1, options_of("ddp"));
  for (const std::string& strategy : Placement::preset_names()) {
    for (const int ranks : {1, 2, 4}) {
      FsdpOptions options = options_of(strategy);
      EXPECT_EQ(train(ranks, options), expected) << strategy << ", " << ranks << " ranks";
      options.unit_min_numel = 500;
      options.delay_seed = 3;
      EXPECT_EQ(train(ranks, options), expected) << strategy << ", " << ranks << " ranks, packed";
    }
  }
}

// In the first step all of them have the same gradients.
TEST(StepTogether, UpdatesEachParameterAsItsOptimizerAloneDoes) {
  on_ranks(2, options_of("zero3"), [](Both& both) {
    Rank of_matrices(both.world, options_of("zero3")), of_rest(both.world, options_of("zero3"));
    SpectralSign alone(of_matrices.fsdp, 0.75f);
    AdamW adamw(of_rest.fsdp, {.weight_decay = 0});
    const std::vector<float> start = both.values();
    both.train(0, 1);
    alone.step(0.02, of_matrices.gradients(0), 0.5);
    adamw.step(0.003, of_rest.gradients(0), 0.5);
    const std::vector<float> all = both.values(), a = of_matrices.values(), b = of_rest.values();
    std::size_t at = 0;
    for (const Parameter* p : both.fsdp.parameters()) {
      for (std::int64_t i = 0; i < p->shape.numel(); ++i, ++at) {
        ASSERT_EQ(all[at], is_matrix(*p) ? a[at] : b[at]) << p->name;
        ASSERT_NE(all[at], start[at]) << p->name;
      }
    }
    EXPECT_NE(a, b);
  });
}

TEST(StepTogether, GoesOnFromACheckpointOnOtherRanks) {
  const testing::TempFolder folder;
  const std::vector<float> expected = train(1, options_of("ddp"));
  on_ranks(4, options_of("hfsdp"), [&](Both& both) {
    Checkpointer checkpointer(both.world, both.parts(), {.folder = folder / "c"});
    both.train(0, 2);
    checkpointer.save(2, {});
    checkpointer.wait();
  });
  const std::string path = folder / "c/step_2";
  for (const char* strategy : {"zero3", "zero1", "hsdp", "ddp"}) {
    for (const int ranks : {1, 2, 4}) {
      on_ranks(ranks, options_of(strategy), [&](Both& both) {
        load_checkpoint(both.world, both.parts(), path);
        both.train(2, 3);
        EXPECT_EQ(both.all(), expected) << strategy << ", " << ranks << " ranks";
      });
    }
  }
  // States of parameters that another one updates are not there.
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    Rank rank(world, options_of("zero3"));
    SpectralSign momentum(rank.fsdp, 0.75f);
    AdamW moments(rank.fsdp, {});
    const auto error = [&](const Optimizers& optimizers) {
      return error_of<InvalidArgument>([&] {
        load_checkpoint(world, std::vector<CheckpointPart>{{&rank.fsdp, optimizers}}, path);
      });
    };
    EXPECT_TRUE(
        has(error(&moments), {"optimizers: expected 1, got 2", "missing: optimizer.m h.0.weight",
                              "unexpected: optimizer.momentum h.0.weight"}));
    EXPECT_TRUE(has(error(&momentum), {"missing: optimizer.momentum h.0.bias"}));
    EXPECT_EQ(error(&moments).find("optimizer.m h.0.bias"), std::string::npos);
  });
}

TEST(StepTogether, KeepsNoStatesAndGathersNothingOfUnitsThatItLeavesAlone) {
  comm::run_ranks(2, {}, [&](ProcessGroup& inner) {
    testing::CollectiveLog log;
    testing::LoggedGroup world(inner, log);
    Both both(world, options_of("zero3"));
    const GradNorm norm = both.gradients(0);
    log.take();
    both.step(norm);
    int num_whole = 0, num_renewed = 0;
    for (const std::string& line : log.take()) {
      EXPECT_EQ(line.find("root whole"), std::string::npos) << line;
      num_whole += line.ends_with(" whole") ? 1 : 0;
      num_renewed += line.find("root forward") != std::string::npos ? 1 : 0;
    }
    EXPECT_EQ(num_whole, 3);
    EXPECT_EQ(num_renewed, 1) << "once, after both";
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      static_cast<void>(both.matrices.full_state(both.model.scale, "momentum"));
                    }),
                    {"expected a parameter that it updates", "scale"}));
    EXPECT_THROW(both.rest.full_state(both.model.layers[0]->weight, "m"), InvalidArgument);
  });
}

TEST(StepTogether, SkipsWhatIsNotFiniteAndFollowsWhatIsFrozen) {
  FsdpOptions options = options_of("zero3");
  options.non_finite = NonFinite::kSkip;
  on_ranks(2, options, [](Both& both) {
    both.train(0, 1);
    const std::vector<float> before = both.all();
    both.step(both.gradients(1, std::numeric_limits<float>::infinity()));
    EXPECT_EQ(both.all(), before);
    for (const bool trainable : {false, true}) {
      both.model.layers[1]->weight.trainable = trainable;
      both.model.layers[2]->bias.trainable = trainable;
      both.fsdp.trainable_changed();
      const std::vector<float> weight = both.fsdp.full_parameter(both.model.layers[1]->weight);
      both.train(1, 2);
      EXPECT_EQ(both.fsdp.full_parameter(both.model.layers[1]->weight) != weight, trainable);
      // Made now, its slots are in another order than those of the others.
      const AdamW later(both.fsdp, {.weight_decay = 0, .updates = is_vector});
    }
    AdamW later(both.fsdp, {.weight_decay = 0, .updates = is_vector});
    step_together({{&both.matrices, 0.02}, {&later, 0.003}}, both.gradients(3), 0);
  });
}

TEST(StepTogether, RefusesParametersOfNoneOrTwoByName) {
  on_ranks(2, options_of("zero3"), [](Both& both) {
    Both other(both.world, options_of("zero3"));
    AdamW all(both.fsdp, {});
    const auto error = [](const std::function<void()>& fn) {
      return error_of<InvalidArgument>(fn);
    };
    const GradNorm norm = both.gradients(0);
    EXPECT_TRUE(has(error([&] { both.rest.step(0.1, norm, 0); }),
                    {"step_together()", "got a step of its own", "h.0.weight"}));
    EXPECT_TRUE(has(error([&] { both.rest.step_in_backward(0.1); }), {"step_together()"}));
    EXPECT_TRUE(has(error([&] {
                      step_together({{&both.rest, 0.1}}, norm, 0);
                    }),
                    {"one optimizer of each parameter", "got 0 (h.0.weight)"}));
    EXPECT_TRUE(has(error([&] {
                      step_together({{&both.rest, 0.1}, {&all, 0.1}}, norm, 0);
                    }),
                    {"got 2 (h.0.bias)"}));
    EXPECT_TRUE(has(error([&] {
                      step_together({{&both.matrices, 0.1}, {&other.rest, 0.1}}, norm, 0);
                    }),
                    {"of one Fsdp"}));
    EXPECT_TRUE(has(error([&] { step_together({}, norm, 0); }), {"got none"}));
    EXPECT_TRUE(has(error([&] {
                      AdamW(both.fsdp, {.groups = {{.name = "a", .parameters = {"h.1.weight"}}},
                                        .updates = is_vector});
                    }),
                    {"parameters that it updates", "'h.1.weight' (group 'a')"}));
    both.step(norm);  // the gradients are there still
    EXPECT_TRUE(has(error([&] { both.step(norm); }), {"finish_step()"}));
  });
  FsdpOptions options = options_of("zero3");
  options.offload.optimizer = 0.5;
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    Rank rank(world, options);
    AdamW a(rank.fsdp, {.updates = is_matrix}), b(rank.fsdp, {.updates = is_vector});
    const GradNorm norm = rank.gradients(0);
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      step_together({{&a, 0.1}, {&b, 0.1}}, norm, 0);
                    }),
                    {"nothing offloaded"}));
  });
}

// Of one optimizer it is that one's step, with offload and bf16 copies as well.
TEST(StepTogether, OfOneIsItsOwnStep) {
  const auto train = [](bool is_together) {
    std::vector<float> result;
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      FsdpOptions options = options_of("zero3");
      options.precision.param = DType::kBF16;
      options.offload = {.parameters = 0.5, .gradients = 0.5, .optimizer = 0.5};
      Rank rank(world, options);
      AdamW adam(rank.fsdp, {});
      for (int step = 0; step < 3; ++step) {
        const GradNorm norm = rank.gradients(step);
        if (is_together) {
          step_together({{&adam, 0.1}}, norm, /*max_norm=*/1);
        } else {
          adam.step(0.1, norm, /*max_norm=*/1);
        }
      }
      const std::vector<float> values = rank.values(&adam);
      if (world.rank() == 0) result = values;
    });
    return result;
  };
  EXPECT_EQ(train(true), train(false));
}

}  // namespace
}  // namespace tessera::shard
