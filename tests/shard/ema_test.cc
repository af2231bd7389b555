// Averages of the parameters: their bits, evaluation with them, checkpoints; and pieces that a rank
// owns.
#include "shard/ema.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/cut_values.h"
#include "shard/optimizer/adamw.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::InvalidArgument;
using engine::Parameter;
using engine::Tensor;
using testing::error_of;
using testing::has;

using Floats = std::vector<float>;

constexpr int kMicroBatches = 12;
constexpr double kDecays[] = {0.9, 0.25, 0.75, 0.9};

FsdpOptions options_of(const std::string& strategy) {
  return {.placement = Placement::preset(strategy)};
}

// One rank of a training on as many micro-batches a step, whatever the number of ranks.
struct Rank : testing::ToyRank {
  explicit Rank(ProcessGroup& world, const FsdpOptions& options)
      : ToyRank(world, options), world(world) {}

  void train(int from, int to, bool in_backward = false) {
    const int accum = kMicroBatches / world.size();
    for (int step = from; step < to; ++step) {
      if (in_backward) optimizer.step_in_backward(0.01);
      for (int micro = 0; micro < accum; ++micro) {
        micro == 0 ? fsdp.begin_step(accum) : fsdp.next_micro_step();
        const int number = (step * accum + micro) * world.size() + world.rank();
        const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
        tape.backward(loss(random.normal(0)));
      }
      const GradNorm norm = fsdp.finish_step();
      if (!in_backward) optimizer.step(0.01, norm, 0);
      ema.update(kDecays[step]);
    }
  }
  Floats averages() {
    Floats all;
    for (const Parameter* p : fsdp.parameters()) {
      if (!p->trainable) continue;
      const Floats average = ema.full_average(*p);
      all.insert(all.end(), average.begin(), average.end());
    }
    return all;
  }
  float evaluate_averages() {
    float result = 0;
    ema.swap_in([&] { result = evaluate(); });
    return result;
  }

  ProcessGroup& world;
  AdamW optimizer{fsdp, {}};
  Ema ema{fsdp};
};

void on_ranks(int ranks, const FsdpOptions& options, const std::function<void(Rank&)>& fn) {
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    Rank rank(world, options);
    fn(rank);
  });
}

struct Outcome {
  Floats values, averages;
  float evaluated = 0;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome outcome_of(Rank& rank) {
  Outcome outcome{.values = rank.values(), .averages = rank.averages()};
  outcome.evaluated = rank.evaluate_averages();
  EXPECT_EQ(rank.values(), outcome.values) << "they have their own values again";
  EXPECT_EQ(rank.averages(), outcome.averages);
  return outcome;
}

Outcome train(int ranks, const FsdpOptions& options, bool in_backward = false) {
  Outcome outcome;
  on_ranks(ranks, options, [&](Rank& rank) {
    rank.train(0, 2, in_backward);
    rank.evaluate_averages();  // changes nothing of what follows
    rank.train(2, 3, in_backward);
    const Outcome mine = outcome_of(rank);
    if (rank.world.rank() + 1 == ranks) outcome = mine;
  });
  return outcome;
}

TEST(Ema, HasTheSameBitsForEveryStrategyAndNumberOfRanks) {
  const Outcome expected = train(1, options_of("ddp"));
  EXPECT_NE(expected.averages, expected.values);
  for (const std::string& strategy : Placement::preset_names()) {
    for (const int ranks : {1, 2, 3, 4}) {
      if (ranks == 1 && Placement::preset(strategy).is_hybrid()) continue;
      EXPECT_EQ(train(ranks, options_of(strategy)), expected) << strategy << ", " << ranks;
    }
    FsdpOptions options = options_of(strategy);
    options.delay_seed = 3;
    options.unit_min_numel = 500;
    EXPECT_EQ(train(4, options, /*in_backward=*/true), expected) << strategy << ", in backward";
  }
}

TEST(Ema, HasTheSameBitsWithOffloadAndInBf16) {
  for (const engine::DType param : {engine::DType::kF32, engine::DType::kBF16}) {
    std::optional<Outcome> expected;
    for (const char* strategy : {"zero3", "hfsdp", "zero1"}) {
      for (const double fraction : {0.0, 0.5, 1.0}) {
        FsdpOptions options = options_of(strategy);
        options.precision.param = param;
        options.offload = {.parameters = fraction, .optimizer = fraction};
        if (fraction > 0 && !can_offload_parameters(options.placement, options.precision)) continue;
        const Outcome got = train(4, options);
        if (!expected) expected = got;
        EXPECT_EQ(got, *expected) << strategy << ", " << fraction;
      }
    }
  }
}

TEST(Ema, IsTorchsLerpOfTheValuesAfterEachUpdate) {
  on_ranks(2, options_of("zero3"), [](Rank& rank) {
    Floats expected = rank.values();
    EXPECT_EQ(rank.averages(), expected) << "starts there";
    for (int step = 0; step < 4; ++step) {
      rank.train(step, step + 1);
      const Floats values = rank.values();
      const auto weight = static_cast<float>(1 - kDecays[step]);
      for (std::size_t i = 0; i < values.size(); ++i) {
        float& a = expected[i];
        const float p = values[i];
        a = weight < 0.5f ? a + weight * (p - a) : p - (p - a) * (1 - weight);
      }
      EXPECT_EQ(rank.averages(), expected) << step;
    }
    rank.ema.update(1);
    EXPECT_EQ(rank.averages(), expected);
    rank.ema.reset();
    EXPECT_EQ(rank.averages(), rank.values());
    for (const double decay : {-0.1, 1.1}) {
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.ema.update(decay); }), {"from 0 to 1"}));
    }
  });
}

// Under each strategy what is gathered, or computed with, is that of the averages.
TEST(Ema, IsWhatIsEvaluatedWith) {
  for (const std::string& strategy : Placement::preset_names()) {
    for (const engine::DType param : {engine::DType::kF32, engine::DType::kBF16}) {
      FsdpOptions options = options_of(strategy);
      options.precision.param = param;
      on_ranks(4, options, [&](Rank& rank) {
        rank.train(0, 2);
        std::map<std::string, Floats> averages;
        for (const Parameter* p : rank.fsdp.parameters()) {
          averages[p->name] = rank.ema.full_average(*p);
        }
        const float with_own = rank.evaluate(), with_averages = rank.evaluate_averages();
        EXPECT_EQ(rank.evaluate(), with_own) << strategy;
        for (const Parameter* p : rank.fsdp.parameters()) rank.fsdp.load(*p, averages[p->name]);
        EXPECT_EQ(rank.evaluate(), with_averages) << strategy;
        EXPECT_NE(with_averages, with_own);
      });
    }
  }
}

TEST(Ema, RefusesWhatWouldBeLostAndComesBackFromAnError) {
  const testing::TempFolder folder;
  on_ranks(2, options_of("zero3"), [&](Rank& rank) {
    Checkpointer checkpointer(rank.world, {{&rank.fsdp, &rank.optimizer, &rank.ema}},
                              {.folder = folder / "c"});
    rank.train(0, 1);
    const Floats values = rank.values(), averages = rank.averages();
    rank.ema.swap_in([&] {
      const auto refused = [](const std::function<void()>& fn) {
        EXPECT_TRUE(has(error_of<InvalidArgument>(fn), {"Ema::swap_in()"}));
      };
      refused([&] { rank.fsdp.begin_step(); });
      refused([&] { rank.ema.update(0.9); });
      refused([&] { rank.ema.swap_in([] {}); });
      refused([&] { checkpointer.save(1, {}); });
    });
    EXPECT_THROW(rank.ema.swap_in([] { throw std::runtime_error("fails"); }), std::runtime_error);
    EXPECT_EQ(rank.values(), values);
    EXPECT_EQ(rank.averages(), averages);
    rank.fsdp.begin_step();
    EXPECT_THROW(rank.ema.update(0.9), InvalidArgument);
    EXPECT_THROW(rank.ema.swap_in([] {}), InvalidArgument);
    rank.fsdp.cancel_step();
  });
}

TEST(Ema, GoesOnFromACheckpointOnOtherRanks) {
  const testing::TempFolder folder;
  Outcome expected;
  on_ranks(4, options_of("hfsdp"), [&](Rank& rank) {
    Checkpointer checkpointer(rank.world, {{&rank.fsdp, &rank.optimizer, &rank.ema}},
                              {.folder = folder / "c"});
    rank.train(0, 2);
    checkpointer.save(2, {});
    rank.ema.update(0.5);  // while the copy is made: not part of it
    checkpointer.wait();
  });
  on_ranks(1, options_of("ddp"), [&](Rank& rank) {
    rank.train(0, 3);
    expected = outcome_of(rank);
  });
  for (const char* strategy : {"zero3", "ddp", "zero1", "hsdp"}) {
    for (const int ranks : {2, 3, 4}) {
      on_ranks(ranks, options_of(strategy), [&](Rank& rank) {
        load_checkpoint(rank.world,
                        std::vector<CheckpointPart>{{&rank.fsdp, &rank.optimizer, &rank.ema}},
                        folder / "c/step_2");
        rank.train(2, 3);
        EXPECT_EQ(outcome_of(rank), expected) << strategy << ", " << ranks;
      });
    }
  }
  on_ranks(2, options_of("zero3"), [&](Rank& rank) {
    const std::vector<CheckpointPart> without = {{&rank.fsdp, &rank.optimizer}},
                                      with = {{&rank.fsdp, &rank.optimizer, &rank.ema}};
    const auto error = [&](const std::vector<CheckpointPart>& parts, const std::string& path) {
      return error_of<InvalidArgument>([&] { load_checkpoint(rank.world, parts, path); });
    };
    EXPECT_TRUE(has(error(without, folder / "c/step_2"), {"unexpected: ema h.0.weight"}));
    Checkpointer checkpointer(rank.world, without, {.folder = folder / "without"});
    checkpointer.save(1, {});
    checkpointer.wait();
    EXPECT_TRUE(has(error(with, folder / "without/step_1"), {"missing: ema h.0.weight"}));
  });
}

TEST(Ema, FollowsWhatIsFrozenAndSetFree) {
  Floats expected;
  for (const char* strategy : {"ddp", "zero3", "hfsdp"}) {
    on_ranks(4, options_of(strategy), [&](Rank& rank) {
      Parameter& weight = rank.model.layers[1]->weight;
      const Floats bias = [&] {
        rank.train(0, 1);
        return rank.ema.full_average(rank.model.layers[1]->bias);
      }();
      weight.trainable = false;
      rank.fsdp.trainable_changed();
      EXPECT_EQ(rank.ema.full_average(rank.model.layers[1]->bias), bias);
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.ema.full_average(weight); }),
                      {"frozen", "h.1.weight"}));
      rank.train(1, 2);
      rank.evaluate_averages();
      weight.trainable = true;
      rank.fsdp.trainable_changed();
      EXPECT_EQ(rank.ema.full_average(weight), rank.fsdp.full_parameter(weight));
      rank.train(2, 3);
      const Floats averages = rank.averages();
      if (rank.world.rank() != 0) return;
      if (expected.empty()) expected = averages;
      EXPECT_EQ(averages, expected) << strategy;
    });
  }
}

// A rank counts each element by the share that it has of its copies: together that is one.
TEST(OwnedPieces, AreAllElementsAsOftenAsThereAreCopies) {
  for (const std::string& strategy : Placement::preset_names()) {
    for (const double fraction : {0.0, 0.5}) {
      FsdpOptions options = options_of(strategy);
      options.offload.parameters = fraction;
      if (fraction > 0 && !can_offload_parameters(options.placement, options.precision)) continue;
      std::mutex mutex;
      std::map<std::string, std::vector<int>> seen;
      on_ranks(4, options, [&](Rank& rank) {
        rank.train(0, 1);
        CutValues cut(rank.fsdp);
        for (const Parameter* p : rank.fsdp.parameters()) {
          const Floats whole = rank.fsdp.full_parameter(*p);
          const Mesh& mesh = rank.fsdp.mesh();
          const int copies =
              mesh.world().size() / mesh.num_parts(rank.fsdp.location_of(*p).flat.owner);
          cut.for_each_owned(*p, [&](Range elements, const Tensor& values) {
            ASSERT_EQ(values.numel(), elements.numel);
            const std::lock_guard lock(mutex);
            std::vector<int>& counts = seen[p->name];
            counts.resize(whole.size());
            for (std::int64_t i = 0; i < elements.numel; ++i) {
              const auto at = static_cast<std::size_t>(elements.begin + i);
              ASSERT_EQ(values.data<float>()[i], whole[at]) << strategy;
              counts[at] += 12 / copies;
            }
          });
        }
        rank.fsdp.begin_step();
        EXPECT_THROW(cut.for_each_owned(rank.model.scale, [](Range, const Tensor&) {}),
                     InvalidArgument);
        rank.fsdp.cancel_step();
      });
      EXPECT_EQ(seen.size(), 7u);
      for (const auto& [name, counts] : seen) {
        EXPECT_EQ(counts, std::vector<int>(130, 12)) << strategy << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::shard
