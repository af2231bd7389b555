// Models that no rank could hold whole: initial values without a whole model anywhere; and
// parameters that are left to the caller.
#include "shard/initialise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/toy_model.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Category;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using tessera::testing::error_of;
using tessera::testing::has;
using tessera::testing::ToyModel;

constexpr std::int64_t kNumel = 1280;

// Each element depends on all others.
void normalised(const Parameter& p, std::span<float> values) {
  p.init.write(values.data(), 0, p.shape.numel(), p.name, 5);
  float sum = 0;
  for (const float v : values) sum += v * v;
  for (float& v : values) v /= std::sqrt(sum);
}

using Values = std::map<std::string, std::vector<float>>;

Values values_of(Fsdp& fsdp) {
  Values values;
  for (const Parameter* p : fsdp.parameters()) values[p->name] = fsdp.full_parameter(*p);
  return values;
}

TEST(Initialise, HasTheValuesOfOneProcess) {
  for (const int only_rank : {-1, 0, 1}) {
    Values expected;
    for (const int ranks : {1, 2, 4}) {
      if (only_rank >= ranks) continue;
      for (const std::string& strategy : Placement::preset_names()) {
        comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
          const Memory memory({.poison = true});
          ToyModel model(3, kNumel);
          Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root,
                    {.placement = Placement::preset(strategy)});
          int num_calls = 0;
          initialise(
              fsdp,
              [&](const Parameter& p, std::span<float> values) {
                ++num_calls;
                normalised(p, values);
              },
              only_rank);
          EXPECT_EQ(num_calls, only_rank < 0 || only_rank == world.rank() ? 7 : 0);
          const Values values = values_of(fsdp);
          if (world.rank() != 0) return;
          std::vector<float> scale(kNumel);
          normalised(model.scale, scale);
          EXPECT_EQ(values.at("scale"), scale);
          if (expected.empty()) expected = values;
          EXPECT_EQ(values, expected) << strategy << " ranks " << ranks;
        });
      }
    }
  }
}

// What a rank holds at most while a model is made: its shards and the slots, one unit of parameters
// here; with values that need a whole parameter, that one as well, and what is sent of it.
TEST(Initialise, TakesTheShardsAndOneUnit) {
  constexpr int kRanks = 5, kBlocks = 8;
  constexpr std::int64_t kUnit = 2 * kNumel, kModel = kBlocks * kUnit;  // elements
  struct Case {
    const char* strategy;
    DType param;
    double offload;
    std::int64_t shard, gathered;  // bytes: of masters and what is gathered from, of a slot
  };
  const Case cases[] = {
      {"zero3", DType::kF32, 0, 4 * kModel / kRanks, 4 * kUnit},
      {"zero3", DType::kF32, 1, 0, 4 * kUnit},
      {"zero3", DType::kBF16, 0, (4 + 2) * kModel / kRanks, 2 * kUnit},
      {"zero3", DType::kBF16, 1, 0, 2 * kUnit},
      {"zero1", DType::kF32, 0, 4 * kModel, 0},
      {"zero1", DType::kBF16, 0, 4 * kModel / kRanks + 2 * kModel, 0},
      {"zero1", DType::kBF16, 1, 2 * kModel, 0},
      {"ddp", DType::kF32, 0, 4 * kModel, 0},
      {"ddp", DType::kBF16, 0, (4 + 2) * kModel, 0},
      {"ddp", DType::kBF16, 1, 2 * kModel, 0},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message()
                 << c.strategy << " " << engine::name_of(c.param) << " offload " << c.offload);
    comm::run_ranks(kRanks, {}, [&](ProcessGroup& world) {
      const Memory memory;
      ToyModel model(kBlocks, kNumel);
      Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), nullptr,
                {.placement = Placement::preset(c.strategy),
                 .prefetch = 0,
                 .reductions_in_flight = 0,
                 .precision = {.param = c.param},
                 .offload = {.parameters = c.offload}});
      const auto peak = [&](const Memory& m, Category category) {
        return m.stats().peak_nbytes[static_cast<std::size_t>(category)];
      };
      fsdp.synchronize();
      // Once more, with values that need a whole parameter: of every rank's own, and of one.
      const std::int64_t before = memory.stats().total_nbytes;
      const std::int64_t on_host = fsdp.host_memory().stats().total_nbytes;
      EXPECT_EQ(peak(memory, Category::kParameterShard), c.shard);
      EXPECT_EQ(peak(memory, Category::kGatheredParameter), c.gathered);
      EXPECT_EQ(peak(memory, Category::kWorkspace), 0);
      if (c.strategy == std::string("zero3")) {
        EXPECT_EQ(peak(memory, Category::kGradient), 4 * kModel / kRanks + 4 * kUnit);
      }
      for (const int only_rank : {-1, 0}) {
        initialise(fsdp, normalised, only_rank);
        fsdp.synchronize();
        const int num_whole = only_rank == world.rank() ? 2 : 1;
        EXPECT_EQ(memory.stats().peak_total_nbytes, before + num_whole * 4 * kNumel);
        EXPECT_EQ(memory.stats().total_nbytes, before);
        EXPECT_EQ(fsdp.host_memory().stats().peak_total_nbytes, on_host);
      }
    });
  }
}

TEST(Initialise, IsRefusedInsideAStep) {
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    const Memory memory;
    ToyModel model(1, kNumel);
    Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root, {});
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { initialise(fsdp, normalised, 1); }),
                    {"[initialise]", "below 1"}));
    fsdp.begin_step();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { initialise(fsdp, normalised); }),
                    {"[initialise]", "got a step"}));
  });
}

// Ignored parameters
// -----------------------------------------------------------------------------------------

// Two steps; layer 1's weight is ignored, or one of the model's.
struct Result {
  Values parameters;
  std::vector<float> norms, own_grad, own_value;
};

Result train(const char* strategy, int ranks, int accum, bool ignores, int packing) {
  Result result;
  result.norms.resize(2);
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    const Memory memory({.poison = true});
    const Stream compute = Stream::inline_cpu("compute");
    Tape tape(memory, compute);
    ToyModel model(3, kNumel);
    Parameter& own = model.layers[1]->weight;
    FsdpOptions options{.placement = Placement::preset(strategy), .unit_min_numel = packing};
    if (ignores) {
      engine::materialize({&own}, memory, /*seed=*/1);
      options.ignores = [&own](const Parameter& p) { return &p == &own; };
    } else {
      own.trainable = false;
    }
    const void* const data = ignores ? own.value.raw() : nullptr;
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
    Sgd optimizer(fsdp, {.momentum = 0.9});
    for (int step = 0; step < 2; ++step) {
      own.grad_written = false;  // its owner's business
      for (int micro = 0; micro < accum; ++micro) {
        micro == 0 ? fsdp.begin_step(accum) : fsdp.next_micro_step();
        const int number = (step * accum + micro) * ranks + world.rank();
        const auto x = Tensor::from<float>(
            memory, {kNumel}, std::vector<float>(kNumel, 1.0f + static_cast<float>(number)));
        tape.backward(model.loss(tape, x));
      }
      const float norm = fsdp.finish_step().value();
      if (world.rank() == 0) result.norms[static_cast<std::size_t>(step)] = norm;
      optimizer.step(1e-3);
    }
    const Values values = values_of(fsdp);
    if (ignores) {
      EXPECT_EQ(own.value.raw(), data) << "not moved";
      EXPECT_EQ(values.count(own.name), 0u);
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { fsdp.full_parameter(own); }), {own.name}));
      EXPECT_TRUE(std::ranges::any_of(fsdp.plan(), [&](const std::string& line) {
        return line.find(own.name) != std::string::npos && line.ends_with("ignored");
      }));
    }
    if (world.rank() != ranks - 1) return;
    result.parameters = values;
    if (!ignores) return;
    result.own_grad = engine::to_vector<float>(own.grad);
    result.own_value = engine::to_vector<float>(own.value);
  });
  return result;
}

TEST(Ignored, ParametersStayTheCallersOwn) {
  for (const char* strategy : {"zero3", "zero1", "ddp"}) {
    for (const int packing : {0, 100000}) {
      // The others train as with a frozen one, which starts from the same formula.
      Result frozen = train("ddp", 1, 2, /*ignores=*/false, 0);
      frozen.parameters.erase("h.1.weight");
      const Result ignored = train(strategy, 2, 1, /*ignores=*/true, packing);
      EXPECT_EQ(ignored.parameters, frozen.parameters) << strategy;
      EXPECT_EQ(ignored.norms, frozen.norms) << "no part of it";
      // Its gradient is that of this rank's own batch.
      const Result alone = train(strategy, 1, 1, /*ignores=*/true, packing);
      EXPECT_EQ(ignored.own_value, alone.own_value) << "not updated";
      EXPECT_NE(ignored.own_grad, alone.own_grad);
      EXPECT_GT(*std::ranges::max_element(ignored.own_grad), 0);
    }
  }
}

TEST(Ignored, ParametersThatDifferBetweenRanksAreNamed) {
  const std::string error = error_of<InvalidArgument>([] {
    comm::run_ranks(2, {}, [](ProcessGroup& world) {
      const Memory memory;
      ToyModel model(2, kNumel);
      const Parameter* own = world.rank() == 0 ? &model.layers[1]->bias : nullptr;
      const Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), model.blocks(), &model.root,
                      {.ignores = [own](const Parameter& p) { return &p == own; }});
    });
  });
  EXPECT_TRUE(has(error, {"[plan]", "unit h.1", "rank 1"}));
}

}  // namespace
}  // namespace tessera::shard
