// Offload to memory of the host: the bits and the collectives of a run without, errors, and what is
// refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/forwarding_group.h"
#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/elementwise_optimizer.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Stream;
using engine::Tensor;
using testing::concurrently;
using testing::error_of;
using testing::has;
using testing::ToyModel;
using testing::ToyRank;
using testing::train;
using testing::Training;

const std::vector<OffloadOptions> kOffloads = {
    {.parameters = 1, .gradients = 1, .optimizer = 1},
    {.parameters = 0.4, .gradients = 0.7, .optimizer = 0.2},
    {.parameters = 0.7, .gradients = 0.2, .optimizer = 0.45, .threads = 3},
    {.parameters = 1},
    {.gradients = 1},
    {.optimizer = 1},
    {.gradients = 1.0 / 3, .optimizer = 0.61, .threads = 2},
};

// With the first `count` of kOffloads.
void expect_bits_without(const Training& run, const std::string& what,
                         std::size_t count = kOffloads.size()) {
  std::vector<OffloadOptions> offloads = {{}};
  for (const OffloadOptions& offload :
       std::span(kOffloads).first(testing::at_most_if_slow(2, count))) {
    if (offload.parameters > 0 &&
        !can_offload_parameters(run.options.placement, run.options.precision)) {
      continue;
    }
    offloads.push_back(offload);
  }
  const auto values = concurrently(offloads, [&](const OffloadOptions& offload) {
    Training mine = run;
    mine.options.offload = offload;
    return train(mine);
  });
  for (std::size_t i = 1; i < offloads.size(); ++i) {
    EXPECT_EQ(values[i], values[0]) << what << ", offload " << offloads[i].parameters << " "
                                    << offloads[i].gradients << " " << offloads[i].optimizer;
  }
}

class OffloadOn : public ::testing::TestWithParam<int> {};

TEST_P(OffloadOn, HasTheBitsOfNoneForEveryStrategy) {
  const int ranks = GetParam();
  for (const std::string name :
       {"ddp", "zero1", "zero2", "zero3", "shard_grad_op", "hsdp", "hybrid_zero2", "hfsdp"}) {
    if (ranks == 1 && Placement::preset(name).is_hybrid()) continue;
    Training run{.ranks = ranks, .accum = 2, .blocks = 4, .numel = 700};
    run.options.placement = Placement::preset(name);
    run.poison = true;
    run.adamw = ranks % 2 == 0;
    run.max_norm = 0.5;
    for (const bool is_bf16 : {false, true}) {
      if (testing::kIsSlow && is_bf16 == (ranks % 2 == 0)) continue;
      run.options.precision.param = is_bf16 ? DType::kBF16 : DType::kF32;
      expect_bits_without(run, name + (is_bf16 ? " bf16" : ""));
    }
    run.delay_seed = 5;
    run.steps = 2;
    expect_bits_without(run, name + " delayed", 3);
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, OffloadOn, ::testing::Values(1, 2, 3, 4));

TEST(Offload, HasTheBitsOfNoneWhateverTheSchedule) {
  for (const std::string name : {"zero3", "zero1", "ddp"}) {
    if (testing::kIsSlow && name != "zero3") continue;
    Training base{.ranks = 2, .accum = 2, .steps = 4, .blocks = 4, .numel = 700};
    base.options.placement = Placement::preset(name);
    base.options.precision.param = DType::kBF16;
    base.poison = true;
    const auto check = [&](const std::string& what, auto change) {
      Training run = base;
      change(run);
      expect_bits_without(run, name + " " + what);
    };
    check("recompute", [](Training& run) { run.recompute = true; });
    check("rounds", [](Training& run) { run.rounds = 2; });
    check("units that a step leaves out", [](Training& run) { run.rests = true; });
    check("and that are skipped", [](Training& run) {
      run.rests = run.adamw = true;
      run.options.unused_parameters = UnusedParameters::kSkip;
    });
    check("no_sync", [](Training& run) { run.no_sync = true; });
    check("packed", [](Training& run) { run.options.unit_min_numel = 2000; });
    check("prefetch 0", [](Training& run) { run.options.prefetch = 0; });
    check("prefetch 3", [](Training& run) { run.options.prefetch = 3; });
    check("none in flight", [](Training& run) { run.options.reductions_in_flight = 0; });
    check("all in flight", [](Training& run) { run.options.reductions_in_flight = 4; });
    check("one micro-step", [](Training& run) { run.accum = 1; });
    check("bf16 gradients", [](Training& run) {
      run.options.precision = {DType::kBF16, DType::kBF16, DType::kBF16};
    });
    for (const UpdateGathers gathers : {UpdateGathers::kInterleaved, UpdateGathers::kContiguous}) {
      check("in backward", [&](Training& run) {
        run.in_backward = gathers;
        run.delay_seed = 9;
        run.steps = 2;
      });
    }
  }
}

// Poisoning waits where nothing else may.
TEST(Offload, HasTheBitsOfNoneWithoutPoison) {
  for (const std::string name : {"ddp", "zero3"}) {
    Training run{.ranks = 2, .accum = 2, .steps = 2, .blocks = 5, .numel = 700};
    run.options.placement = Placement::preset(name);
    run.options.precision.param = DType::kBF16;
    for (const std::uint64_t seed : {11, 12, 13}) {
      run.delay_seed = seed;
      run.options.prefetch = static_cast<int>(seed % 3);
      expect_bits_without(run, name);
    }
  }
}

struct Rank : testing::ToyRank {
  Rank(comm::ProcessGroup& world, const FsdpOptions& options)
      : ToyRank(world, options, {.blocks = 4, .numel = 700, .poison = false}) {}
  Tensor loss(float first = 0.25f) { return model.loss(tape, input(0.25f, first)); }
};

// The collectives of rank 0 in the second step, and in its update.
std::vector<std::string> collectives(FsdpOptions options, std::optional<UpdateGathers> early) {
  std::vector<std::string> lines;
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& ranks) {
    testing::CollectiveLog log;
    testing::LoggedGroup world(ranks, log);
    Rank rank(world, options);
    AdamW adamw(rank.fsdp, {});
    for (int step = 0; step < 2; ++step) {
      log.take();
      if (early) adamw.step_in_backward(0.1, *early);
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss());
      const GradNorm norm = rank.fsdp.finish_step();
      if (!early) adamw.step(0.1, norm, 1);
    }
    if (world.rank() == 0) lines = log.take();
  });
  return lines;
}

TEST(Offload, CollectivesAreThoseOfNoneInTheSameOrder) {
  const std::optional<UpdateGathers> updates[] = {std::nullopt, UpdateGathers::kContiguous,
                                                  UpdateGathers::kInterleaved};
  for (const std::string name : {"zero3", "zero1", "ddp"}) {
    for (const auto& early : updates) {
      FsdpOptions options{.placement = Placement::preset(name)};
      options.precision.param = DType::kBF16;  // masters apart
      const std::vector<std::string> without = collectives(options, early);
      const std::vector<std::string> contiguous = collectives(options, UpdateGathers::kContiguous);
      EXPECT_GE(without.size(), 5u);
      for (const OffloadOptions& offload : kOffloads) {
        options.offload = offload;
        const std::vector<std::string> lines = collectives(options, early);
        std::vector<std::string> expected = without;
        // Gathers of what the host updates would hold up all after them, so they follow after the
        // norm, as the next forward needs them.
        if (early && offload.optimizer > 0) {
          expected = contiguous;
          const auto is_gradient = [](const std::string& l) { return l.ends_with(" gradient"); };
          const auto last = std::ranges::find_if(expected.rbegin(), expected.rend(), is_gradient);
          const auto norm = std::ranges::find(expected, "all_gather norm");
          std::rotate(last.base(), norm, norm + 1);
        }
        EXPECT_EQ(lines, expected)
            << name << ", updates " << (early ? static_cast<int>(*early) : -1) << ", offload "
            << offload.parameters << " " << offload.gradients << " " << offload.optimizer;
      }
    }
  }
}

// Values by parameter are whole wherever they lie.
TEST(Offload, ValuesGoInAndOut) {
  std::vector<std::vector<float>> all;
  for (const OffloadOptions& offload : {OffloadOptions{}, kOffloads[0], kOffloads[1]}) {
    comm::run_ranks(3, {}, [&](comm::ProcessGroup& world) {
      Rank rank(world, {.offload = offload});
      AdamW adamw(rank.fsdp, {});
      const engine::Parameter& p = rank.model.layers[1]->weight;
      std::vector<float> values(700);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.01f * static_cast<float>(i);
      rank.fsdp.load(p, values);
      rank.fsdp.parameters_changed();
      EXPECT_EQ(rank.fsdp.full_parameter(p), values);
      adamw.load_state(p, "m", values);
      EXPECT_EQ(adamw.full_state(p, "m"), values);
      EXPECT_EQ(adamw.full_state(p, "v"), std::vector<float>(700, 0.0f));
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss());
      const GradNorm norm = rank.fsdp.finish_step();
      const std::vector<float> gradient = rank.fsdp.full_gradient(p);
      adamw.step(0.1, norm, 1);
      std::vector<float> mine = rank.fsdp.full_parameter(p);
      for (const std::vector<float>& more :
           {gradient, adamw.full_state(p, "m"), adamw.full_state(p, "v")}) {
        mine.insert(mine.end(), more.begin(), more.end());
      }
      if (world.rank() == 0) all.push_back(mine);
    });
  }
  EXPECT_EQ(all[1], all[0]);
  EXPECT_EQ(all[2], all[0]);
}

TEST(Offload, AStepThatIsNotFiniteIsSkippedThereToo) {
  std::vector<std::vector<float>> all;
  for (const OffloadOptions& offload : {OffloadOptions{}, kOffloads[0], kOffloads[1]}) {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      Rank rank(world, {.non_finite = NonFinite::kSkip, .offload = offload});
      AdamW adamw(rank.fsdp, {});
      for (int step = 0; step < 3; ++step) {
        rank.fsdp.begin_step();
        rank.tape.backward(rank.loss(step == 1 && world.rank() == 1 ? std::nanf("") : 0.5f));
        const GradNorm norm = rank.fsdp.finish_step();
        EXPECT_EQ(norm.not_finite(), step == 1 ? "h.0.weight" : "");
        adamw.step(0.1, norm, 1);
      }
      EXPECT_EQ(adamw.num_steps(), 2);
      const std::vector<float> values = rank.fsdp.full_parameter(rank.model.layers[0]->weight);
      if (world.rank() == 0) all.push_back(values);
    });
  }
  EXPECT_EQ(all[1], all[0]);
  EXPECT_EQ(all[2], all[0]);
}

// Gathers of the third block are slow.
class SlowGroup : public comm::ForwardingGroup {
 public:
  explicit SlowGroup(comm::ProcessGroup& inner) : ForwardingGroup(inner) {}
  explicit SlowGroup(std::unique_ptr<comm::ProcessGroup> inner)
      : ForwardingGroup(std::move(inner)) {}
  std::unique_ptr<comm::ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<SlowGroup>(inner().split(color, key));
  }

 private:
  void before(const comm::Collective& c, const Stream& stream) override {
    if (c.work.detail != "h.2 forward") return;
    stream.launch({.name = "slow"},
                  [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); });
  }
};

// A forward of two blocks that is given up leaves the gather of the third on its way, into the slot
// that the second one takes in the next step.
TEST(Offload, AStepThatIsGivenUpLeavesNothingBehind) {
  std::vector<std::vector<float>> all;
  for (const OffloadOptions& offload : {OffloadOptions{}, OffloadOptions{.parameters = 1}}) {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& ranks) {
      SlowGroup world(ranks);
      Rank rank(world, {.offload = offload});
      Sgd sgd(rank.fsdp, {.momentum = 0.9});
      for (int step = 0; step < 3; ++step) {
        rank.fsdp.begin_step();
        Tensor x = Tensor::zeros(rank.memory, {700}, DType::kF32);
        for (const int i : {0, 1}) {
          ToyModel::Layer& layer = *rank.model.layers[static_cast<std::size_t>(i)];
          x = rank.tape.region(layer.block, [&] {
            return testing::affine(rank.tape, x, layer.weight, &layer.bias);
          });
        }
        rank.fsdp.cancel_step();
        rank.tape.clear();
        rank.fsdp.begin_step();
        rank.tape.backward(rank.loss());
        sgd.step(0.1, rank.fsdp.finish_step(), 0);
      }
      std::vector<float> mine;
      for (const engine::Parameter* p : rank.fsdp.parameters()) {
        const std::vector<float> values = rank.fsdp.full_parameter(*p);
        mine.insert(mine.end(), values.begin(), values.end());
      }
      if (world.rank() == 0) all.push_back(mine);
    });
  }
  EXPECT_EQ(all[1], all[0]);
}

// p -= g, late.
class Late : public ElementwiseOptimizer {
 public:
  explicit Late(Fsdp& fsdp)
      : ElementwiseOptimizer(fsdp, {.name = "late", .states = {"m"}, .groups = {{.name = "all"}}}) {
  }
  ~Late() override { end_updates(); }

 private:
  void update(const Target& target, const Stream& stream) override {
    stream.launch({.name = "late"}, [p = target.master, g = target.grad_sum] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      for (std::int64_t i = 0; i < p.numel(); ++i) p.span<float>()[i] -= g.span<float>()[i];
    });
  }
};

// The second step leaves the layers out, so that nothing waits for their update.
TEST(Offload, ASumStaysUntilTheHostHasReadIt) {
  std::vector<std::vector<float>> all;
  for (const OffloadOptions& offload :
       {OffloadOptions{}, OffloadOptions{.gradients = 1, .optimizer = 1},
        OffloadOptions{.optimizer = 1}}) {
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      Rank rank(world, {.placement = Placement::preset("ddp"), .offload = offload});
      Late late(rank.fsdp);
      for (const int rounds : {1, 0, 0}) {
        const Tensor x = Tensor::zeros(rank.memory, {700}, DType::kF32);
        rank.fsdp.begin_step();
        rank.tape.backward(rank.model.loss(rank.tape, x, false, rounds));
        late.step(0.1, rank.fsdp.finish_step(), 0);
      }
      std::vector<float> mine;
      for (const engine::Parameter* p : rank.fsdp.parameters()) {
        const std::vector<float> values = rank.fsdp.full_parameter(*p);
        mine.insert(mine.end(), values.begin(), values.end());
      }
      all.push_back(mine);
    });
  }
  EXPECT_EQ(all[1], all[0]);
  EXPECT_EQ(all[2], all[0]);
}

// A hook that has not been made for offload: what its finish() does to the sum is kept.
class Doubling : public Reducer {
 public:
  explicit Doubling(const ReducerContext& context)
      : Reducer(context), inner_(make_reducer(context)), stream_(context.stream) {}
  void begin_step() override { inner_->begin_step(); }
  void reduce(const Tensor& in, const engine::Event& ready, bool is_last) override {
    inner_->reduce(in, ready, is_last);
  }
  void finish() override {
    stream_.launch({.name = "double"}, [sum = sum()] {
      for (float& x : sum.span<float>()) x *= 2;
    });
  }

 private:
  std::unique_ptr<Reducer> inner_;
  Stream stream_;
};

TEST(Offload, AHookFinishesWhatItHasReduced) {
  std::vector<std::vector<float>> all;
  for (const double scale : {1.0, 2.0, 2.0}) {
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      FsdpOptions options;
      if (scale == 2) {
        options.reducer = [](const ReducerContext& context) {
          return std::make_unique<Doubling>(context);
        };
      }
      if (all.size() == 2) options.offload.gradients = 0.6;
      Rank rank(world, options);
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss());
      rank.fsdp.finish_step();
      const std::vector<float> g = rank.fsdp.full_gradient(rank.model.layers[2]->weight);
      world.barrier("read");
      if (world.rank() == 0) all.push_back(g);
      world.barrier("kept");
    });
  }
  for (float& x : all[0]) x *= 2;
  EXPECT_EQ(all[1], all[0]);
  EXPECT_EQ(all[2], all[0]);
}

// An optimizer that fails where it updates.
class Failing : public ElementwiseOptimizer {
 public:
  explicit Failing(Fsdp& fsdp)
      : ElementwiseOptimizer(fsdp,
                             {.name = "failing", .states = {"m"}, .groups = {{.name = "all"}}}) {}
  ~Failing() override { end_updates(); }

 private:
  void update(const Target& target, const Stream& stream) override {
    stream.launch({.name = "fail"}, [unit = target.unit] {
      if (unit == "h.1") throw std::runtime_error("planted in " + unit);
    });
  }
};

TEST(Offload, AnErrorOfTheHostEndsTheRun) {
  for (const bool is_f32 : {true, false}) {
    const std::string message = error_of<std::runtime_error>([&] {
      comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
        FsdpOptions options{.offload = {.parameters = 1, .gradients = 1, .optimizer = 1}};
        if (!is_f32) options.precision.param = DType::kBF16;
        Rank rank(world, options);
        Failing optimizer(rank.fsdp);
        for (int step = 0; step < 3; ++step) {
          rank.fsdp.begin_step();
          rank.tape.backward(rank.loss());
          optimizer.step(0.1, rank.fsdp.finish_step(), 1);
        }
      });
    });
    EXPECT_TRUE(has(message, {"planted in h.1"})) << message;
  }
}

TEST(Offload, WhatCannotBeHonouredIsRefused) {
  const auto refusal = [](FsdpOptions options) {
    return error_of<InvalidArgument>([&] {
      comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) { Rank rank(world, options); });
    });
  };
  EXPECT_TRUE(has(refusal({.offload = {.parameters = 1.5}}), {"offload.parameters", "1.5"}));
  EXPECT_TRUE(has(refusal({.offload = {.gradients = -0.1}}), {"offload.gradients", "-0.1"}));
  EXPECT_TRUE(has(refusal({.offload = {.optimizer = std::nan("")}}), {"offload.optimizer", "nan"}));
  EXPECT_TRUE(has(refusal({.offload = {.threads = 0}}), {"offload.threads", "0"}));
  for (const char* name : {"ddp", "zero1", "zero2"}) {
    EXPECT_TRUE(has(refusal({.placement = Placement::preset(name), .offload = {.parameters = 0.5}}),
                    {"offload.parameters", "f32", "computed with"}));
  }
}

TEST(Offload, IsPartOfThePlan) {
  const std::string message = error_of<InvalidArgument>([] {
    comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
      Rank rank(world, {.offload = {.optimizer = world.rank() == 0 ? 0.5 : 0.25}});
    });
  });
  EXPECT_TRUE(has(message, {"optimizer=0.5", "optimizer=0.25"})) << message;
}

}  // namespace
}  // namespace tessera::shard
