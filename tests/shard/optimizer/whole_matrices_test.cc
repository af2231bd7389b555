// An optimizer that is written outside the library and needs whole matrices, that of examples/.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "engine/tape.h"
#include "examples/spectral_sign.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/fsdp.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::InvalidArgument;
using engine::Tensor;
using testing::CollectiveLog;
using testing::error_of;
using testing::has;
using testing::LoggedGroup;

constexpr std::int64_t kNumel = 130;
constexpr int kMicroBatches = 4;
constexpr float kDecay = 0.75f;

// One rank's model, of matrices of two rows and vectors, and what trains it.
struct Rank {
  Rank(ProcessGroup& world, const FsdpOptions& options)
      : world(world), fsdp(world, memory, compute, wide(model), &model.root, options) {}

  static std::vector<engine::Block*> wide(testing::ToyModel& model) {
    for (const auto& layer : model.layers) layer->weight.shape = {2, kNumel / 2};
    return model.blocks();
  }
  // Gradients of as many micro-batches, whatever the number of ranks.
  GradNorm gradients(int step) {
    const int accum = kMicroBatches / world.size();
    for (int micro = 0; micro < accum; ++micro) {
      micro == 0 ? fsdp.begin_step(accum) : fsdp.next_micro_step();
      const int number = (step * accum + micro) * world.size() + world.rank();
      const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
      std::vector<float> values(kNumel);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {kNumel}, values, "x")));
    }
    return fsdp.finish_step();
  }
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.step(0.01, gradients(step), /*max_norm=*/0.5);
    }
  }
  // Of all parameters, and their momentum.
  std::vector<float> values() {
    std::vector<float> all;
    for (const engine::Parameter* p : fsdp.parameters()) {
      for (const std::vector<float>& of_p :
           {fsdp.full_parameter(*p), optimizer.full_state(*p, "momentum")}) {
        all.insert(all.end(), of_p.begin(), of_p.end());
      }
    }
    all.push_back(static_cast<float>(optimizer.num_steps()));
    return all;
  }

  ProcessGroup& world;
  engine::Memory memory{{.poison = true}};
  engine::Stream compute = engine::Stream::inline_cpu("compute");
  engine::Tape tape{memory, compute};
  testing::ToyModel model{3, kNumel};
  Fsdp fsdp;
  SpectralSign optimizer{fsdp, kDecay};
};

std::vector<float> train(int ranks, const FsdpOptions& options) {
  std::vector<float> values;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    Rank rank(world, options);
    rank.train(0, 3);
    std::vector<float> mine = rank.values();
    if (world.rank() + 1 == ranks) values = std::move(mine);
  });
  return values;
}

TEST(WholeMatrices, GiveTheSameBitsForEveryStrategyAndNumberOfRanks) {
  const std::vector<float> expected = train(1, {.placement = Placement::preset("ddp")});
  for (const std::string& strategy : Placement::preset_names()) {
    for (const int ranks : {1, 2, 4}) {
      FsdpOptions options{.placement = Placement::preset(strategy)};
      EXPECT_EQ(train(ranks, options), expected) << strategy << ", " << ranks << " ranks";
      options.unit_min_numel = 500;
      options.delay_seed = 3;
      EXPECT_EQ(train(ranks, options), expected) << strategy << ", " << ranks << " ranks, packed";
    }
  }
}

// Of a gradient of two rows the largest singular value has a closed form.
TEST(WholeMatrices, AreSeenWhole) {
  comm::run_ranks(4, {}, [&](ProcessGroup& world) {
    Rank rank(world, {.placement = Placement::preset("zero3")});
    const engine::Parameter& weight = rank.model.layers[1]->weight;
    const std::vector<float> before = rank.fsdp.full_parameter(weight);
    rank.gradients(0);
    const std::vector<float> gradient = rank.fsdp.full_gradient(weight);
    rank.optimizer.step(0.01, ClipFactor{0.5});
    const std::vector<float> after = rank.fsdp.full_parameter(weight);
    const auto product = [&](std::size_t row, std::size_t other) {
      double sum = 0;
      for (std::size_t i = 0; i < kNumel / 2; ++i) {
        sum += double{gradient[row * kNumel / 2 + i]} * gradient[other * kNumel / 2 + i];
      }
      return sum;
    };
    const double trace = product(0, 0) + product(1, 1);
    const double det = product(0, 0) * product(1, 1) - product(0, 1) * product(0, 1);
    const double value = 0.5 * std::sqrt((trace + std::sqrt(trace * trace - 4 * det)) / 2);
    ASSERT_GT(value, 0.01);
    for (std::size_t i = 0; i < before.size(); ++i) {
      const double sign = gradient[i] > 0 ? 1 : -1;
      ASSERT_NEAR(after[i], before[i] - 0.01 * value * sign, 1e-3 * 0.01 * value + 1e-6);
    }
  });
}

TEST(WholeMatrices, AreGatheredOnceAUnit) {
  const std::map<std::string, std::size_t> gathers = {
      {"ddp", 0}, {"zero1", 1}, {"zero3", 1}, {"hsdp", 1}, {"hfsdp", 2}};
  for (const auto& [strategy, expected] : gathers) {
    comm::run_ranks(4, {}, [&, &strategy = strategy, &expected = expected](ProcessGroup& inner) {
      CollectiveLog log;
      LoggedGroup world(inner, log);
      Rank rank(world, {.placement = Placement::preset(strategy)});
      rank.gradients(0);
      log.take();
      rank.optimizer.step(0.01);
      std::map<std::string, std::size_t> whole;
      for (const std::string& line : log.take()) {
        EXPECT_TRUE(line.starts_with("all_gather")) << line;
        if (line.ends_with(" whole")) ++whole[line];
      }
      std::map<std::string, std::size_t> wanted;
      for (const char* unit : {"h.0", "h.1", "h.2", "root"}) {
        if (expected > 0) wanted["all_gather " + std::string(unit) + " whole"] = expected;
      }
      EXPECT_EQ(whole, wanted) << strategy;
    });
  }
}

TEST(WholeMatrices, GoOnFromACheckpointOnOtherRanks) {
  const std::vector<float> expected = train(1, {.placement = Placement::preset("ddp")});
  const testing::TempFolder folder;
  const CheckpointerOptions checkpoints{.folder = folder / "c"};
  comm::run_ranks(4, {}, [&](ProcessGroup& world) {
    Rank rank(world, {.placement = Placement::preset("hfsdp")});
    Checkpointer checkpointer(world, {{&rank.fsdp, &rank.optimizer}}, checkpoints);
    rank.train(0, 2);
    checkpointer.save(2, {});
    checkpointer.wait();
  });
  for (const int ranks : {1, 2, 4}) {
    for (const char* strategy : {"zero3", "zero1", "hsdp"}) {
      comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
        Rank rank(world, {.placement = Placement::preset(strategy)});
        Checkpointer checkpointer(world, {{&rank.fsdp, &rank.optimizer}}, checkpoints);
        ASSERT_TRUE(checkpointer.load_newest());
        rank.train(2, 3);
        EXPECT_EQ(rank.values(), expected) << strategy << ", " << ranks << " ranks";
      });
    }
  }
}

// What no rank's backward reached stays as it is.
TEST(WholeMatrices, LeaveWhatIsUnusedAlone) {
  std::vector<float> expected;
  for (const char* strategy : {"ddp", "zero3"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      Rank rank(world, {.placement = Placement::preset(strategy),
                        .unused_parameters = UnusedParameters::kSkip});
      rank.train(0, 1);
      const std::vector<float> before = rank.fsdp.full_parameter(rank.model.layers[0]->weight);
      rank.fsdp.begin_step();
      const Tensor x =
          Tensor::from<float>(rank.memory, {kNumel}, std::vector<float>(kNumel, 0.5f), "x");
      rank.tape.backward(rank.model.loss(rank.tape, x, false, /*rounds=*/0));
      rank.optimizer.step(0.01, rank.fsdp.finish_step(), 0);
      EXPECT_EQ(rank.fsdp.full_parameter(rank.model.layers[0]->weight), before) << strategy;
      const std::vector<float> values = rank.values();
      if (world.rank() != 0) return;
      if (expected.empty()) expected = values;
      EXPECT_EQ(values, expected) << strategy;
    });
  }
}

TEST(WholeMatrices, AreRefusedWhereAnUpdateIsElementwise) {
  const auto error_with = [](const FsdpOptions& options, bool in_backward) {
    return error_of<InvalidArgument>([&] {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        Rank rank(world, options);
        if (in_backward) rank.optimizer.step_in_backward(0.01);
      });
    });
  };
  const FsdpOptions zero3{.placement = Placement::preset("zero3")};
  EXPECT_TRUE(has(error_with(zero3, true), {"'spectral sign'", "step_in_backward"}));
  for (double OffloadOptions::*part :
       {&OffloadOptions::parameters, &OffloadOptions::gradients, &OffloadOptions::optimizer}) {
    FsdpOptions options = zero3;
    options.offload.*part = 0.5;
    EXPECT_TRUE(has(error_with(options, false), {"'spectral sign'", "nothing offloaded"}));
  }
}

}  // namespace
}  // namespace tessera::shard
