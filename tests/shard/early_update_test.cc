// Updates while backward goes on: the bits of updates after it, how early they are, and what is
// refused.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
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
#include "tests/shard/launch_watch.h"
#include "tests/shard/toy_rank.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::InvalidArgument;
using engine::Stream;
using engine::Tensor;
using testing::concurrently;
using testing::error_of;
using testing::has;
using testing::loss_with;
using testing::ToyRank;
using testing::train;
using testing::Training;
using testing::Watch;

constexpr UpdateGathers kBoth[] = {UpdateGathers::kInterleaved, UpdateGathers::kContiguous};

void expect_bits_of_a_step_behind(const Training& run, const std::string& what) {
  const std::vector<std::optional<UpdateGathers>> ways = {{}, kBoth[0], kBoth[1]};
  const auto values = concurrently(ways, [&](const std::optional<UpdateGathers>& gathers) {
    Training mine = run;
    mine.in_backward = gathers;
    return train(mine);
  });
  EXPECT_EQ(values[1], values[0]) << what << ", interleaved";
  EXPECT_EQ(values[2], values[0]) << what << ", contiguous";
}

class EarlyUpdateOn : public ::testing::TestWithParam<int> {};

TEST_P(EarlyUpdateOn, HasTheBitsOfAStepAfterBackwardForEveryStrategy) {
  const int ranks = GetParam();
  for (const std::string name :
       {"ddp", "zero1", "zero2", "zero3", "shard_grad_op", "hsdp", "hybrid_zero2", "hfsdp"}) {
    if (ranks == 1 && Placement::preset(name).is_hybrid()) continue;
    Training run{.ranks = ranks, .accum = 2, .blocks = 4, .numel = 130};
    run.options.placement = Placement::preset(name);
    run.poison = true;
    run.adamw = ranks % 2 == 0;
    for (const bool is_bf16 : {false, true}) {
      if (testing::kIsSlow && is_bf16 == (ranks % 2 == 0)) continue;
      run.options.precision.param = is_bf16 ? engine::DType::kBF16 : engine::DType::kF32;
      expect_bits_of_a_step_behind(run, name + (is_bf16 ? " bf16" : ""));
    }
    run.delay_seed = 5;
    run.steps = 2;
    expect_bits_of_a_step_behind(run, name + " delayed");
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, EarlyUpdateOn, ::testing::Values(1, 2, 3, 4));

TEST(EarlyUpdate, HasTheBitsOfAStepAfterBackwardWithManyGroups) {
  for (const char* strategy : {"ddp", "zero1", "zero3", "hsdp"}) {
    Training run{.ranks = 4, .blocks = 20, .numel = 130, .adamw = true, .many_groups = true};
    run.options.placement = Placement::preset(strategy);
    expect_bits_of_a_step_behind(run, strategy);
  }
}

TEST(EarlyUpdate, HasTheBitsOfAStepAfterBackwardWhateverTheSchedule) {
  for (const std::string name : {"ddp", "zero1", "zero3"}) {
    Training base{.ranks = 2, .accum = 2, .steps = 4, .blocks = 4, .numel = 130};
    base.options.placement = Placement::preset(name);
    base.poison = true;
    const auto check = [&](const std::string& what, auto change) {
      Training run = base;
      change(run);
      expect_bits_of_a_step_behind(run, name + " " + what);
    };
    check("recompute", [](Training& run) { run.recompute = true; });
    check("rounds", [](Training& run) { run.rounds = 2; });
    check("units that a step leaves out", [](Training& run) { run.rests = true; });
    check("no_sync", [](Training& run) { run.no_sync = true; });
    check("packed", [](Training& run) { run.options.unit_min_numel = 500; });
    check("prefetch 0", [](Training& run) { run.options.prefetch = 0; });
    check("prefetch 3", [](Training& run) { run.options.prefetch = 3; });
    check("post-backward", [](Training& run) {
      run.options.prefetch = 2;
      run.options.backward_prefetch = BackwardPrefetch::kPost;
    });
    check("all in flight", [](Training& run) { run.options.reductions_in_flight = 4; });
    check("one micro-step", [](Training& run) { run.accum = 1; });
  }
}

// A rank without a batch takes part as its peers do, updates included.
TEST(EarlyUpdate, HasTheBitsOfAStepAfterBackwardWhereARankHasNoBatch) {
  const auto run = [](bool early) {
    std::vector<float> result;
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, {}, {.numel = 70, .poison = false});
      Sgd sgd(rank.fsdp, {.momentum = 0.9});
      for (int step = 0; step < 3; ++step) {
        const bool has_batch = step == 0 || world.rank() == 0;
        ASSERT_EQ(rank.fsdp.join(has_batch ? 1 : 0), 1);
        if (early) sgd.step_in_backward(0.1);
        rank.fsdp.begin_step();
        if (has_batch) {
          rank.tape.backward(rank.loss(0.01f * static_cast<float>(step + world.rank() + 1)));
        }
        rank.fsdp.finish_step();
        if (!early) sgd.step(0.1);
      }
      const std::vector<float> mine = rank.values();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  EXPECT_EQ(run(true), run(false));
}

// The backward of the first block does not end before the last block has been updated.
TEST(EarlyUpdate, IsMadeWhileBackwardGoesOn) {
  for (const std::string name : {"ddp", "zero1", "zero3"}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      Watch watch;
      ToyRank rank(world, {.placement = Placement::preset(name), .listener = &watch},
                   {.numel = 40, .poison = false});
      Sgd sgd(rank.fsdp, {});
      sgd.step_in_backward(0.1);
      rank.fsdp.begin_step();
      bool is_early = false;
      rank.tape.backward(
          loss_with(rank.tape, rank.model, [&] { is_early = watch.wait_for("optimizer h.2"); }));
      rank.fsdp.finish_step();
      EXPECT_TRUE(is_early) << name;
    });
  }
}

// p -= g, after what `before` does.
class Slow : public ElementwiseOptimizer {
 public:
  Slow(Fsdp& fsdp, std::function<void(const std::string& unit)> before)
      : ElementwiseOptimizer(fsdp, {.name = "slow", .groups = {{.name = "all"}}}),
        before_(std::move(before)) {}
  ~Slow() override { end_updates(); }

 private:
  void update(const Target& target, const Stream& stream) override {
    stream.launch({.name = "slow"},
                  [this, unit = target.unit, p = target.master, g = target.grad_sum] {
                    before_(unit);
                    for (std::int64_t i = 0; i < p.numel(); ++i)
                      p.data<float>()[i] -= g.data<float>()[i];
                  });
  }
  std::function<void(const std::string& unit)> before_;
};

// The two slots of three units are used in turn: the first unit is gathered into that of the last.
TEST(EarlyUpdate, HoldsUpNoGather) {
  auto groups = comm::make_threads_world(1);
  ToyRank rank(*groups.front(), {}, {.numel = 40, .poison = false});
  std::promise<void> reached;
  std::future_status status = std::future_status::timeout;
  Slow slow(rank.fsdp, [&, future = reached.get_future().share()](const std::string& unit) {
    if (unit == "h.2") status = future.wait_for(std::chrono::seconds(10));
  });
  slow.step_in_backward(0.1);
  rank.fsdp.begin_step();
  rank.tape.backward(loss_with(rank.tape, rank.model, [&] { reached.set_value(); }));
  rank.fsdp.finish_step();
  EXPECT_EQ(status, std::future_status::ready);
}

// The gather of what was updated of the last block is held up until told.
class HeldGroup : public comm::ForwardingGroup {
 public:
  HeldGroup(ProcessGroup& inner, std::function<void()> before)
      : ForwardingGroup(inner), before_(std::move(before)) {}
  HeldGroup(std::unique_ptr<ProcessGroup> inner, std::function<void()> before)
      : ForwardingGroup(std::move(inner)), before_(std::move(before)) {}
  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<HeldGroup>(inner().split(color, key), before_);
  }

 private:
  void before(const comm::Collective& c, const Stream& stream) override {
    if (c.work.detail == "h.2 update") stream.launch({.name = "held"}, before_);
  }
  std::function<void()> before_;
};

// Gathers after the norm, of a step() and of updates on the host, are waited for one by one.
TEST(EarlyUpdate, TheNextForwardBeginsWhileTheLastBlockIsStillGathered) {
  for (const bool on_host : {false, true}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& ranks) {
      std::promise<void> reached;
      std::future_status status = std::future_status::timeout;
      std::atomic<bool> holds = false;  // initial values are gathered, too
      HeldGroup world(ranks, [&, future = reached.get_future().share()] {
        if (holds) status = future.wait_for(std::chrono::seconds(10));
      });
      FsdpOptions options{.placement = Placement::preset("zero1")};
      if (on_host) options.offload.optimizer = 1;
      ToyRank rank(world, options, {.numel = 40, .poison = false});
      Sgd sgd(rank.fsdp, {.momentum = 0.9});
      rank.fsdp.synchronize();
      holds = true;
      for (int step = 0; step < 2; ++step) {
        if (step == 0 && on_host) sgd.step_in_backward(0.1, UpdateGathers::kInterleaved);
        rank.fsdp.begin_step();
        rank.tape.backward(testing::loss_calling(rank.tape, rank.model, 40, [&](std::size_t i) {
          if (step == 1 && i == 0) reached.set_value();
        }));
        const GradNorm norm = rank.fsdp.finish_step();
        if (step == 0 && !on_host) sgd.step(0.1, norm, 0);
      }
      rank.fsdp.synchronize();
      EXPECT_EQ(status, std::future_status::ready) << "on the host " << on_host;
    });
  }
}

// What is updated in parts is gathered with them, whatever the next step is to do.
TEST(EarlyUpdate, OfTheNextStepMayBeToldWhileThisOneIsUpdatedInParts) {
  const auto values = [](bool early_is_told_first) {
    std::vector<float> result;
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      FsdpOptions options{.placement = Placement::preset("zero1")};
      options.offload.optimizer = 1;
      ToyRank rank(world, options, {.numel = 40, .poison = false});
      Sgd sgd(rank.fsdp, {.momentum = 0.9});
      const auto train = [&] {
        rank.fsdp.begin_step();
        rank.tape.backward(rank.loss());
        return rank.fsdp.finish_step();
      };
      sgd.begin_step(0.1, train(), 0);
      if (early_is_told_first) sgd.step_in_backward(0.1);
      for (const auto& unit : rank.fsdp.units()) sgd.step_unit(*unit, rank.fsdp.compute());
      sgd.end_step();
      if (!early_is_told_first) sgd.step_in_backward(0.1);
      train();
      const std::vector<float> mine = rank.values();
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  EXPECT_EQ(values(true), values(false));
}

// An error in backward finds the update of another unit at work.
TEST(EarlyUpdate, EndsBeforeItsOptimizerDoes) {
  for (const int thrower : {0, 1}) {
    const std::string message = error_of<std::runtime_error>([&] {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        ToyRank rank(world, {}, {.numel = 40, .poison = false});
        const std::string alive = "the optimizer's own";
        Slow slow(rank.fsdp, [&](const std::string&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          EXPECT_EQ(alive, "the optimizer's own");
        });
        slow.step_in_backward(0.1);
        rank.fsdp.begin_step();
        rank.tape.backward(loss_with(rank.tape, rank.model, [&] {
          if (world.rank() == thrower) throw std::runtime_error("planted");
        }));
        rank.fsdp.finish_step();
      });
    });
    EXPECT_TRUE(has(message, {"planted"}));
  }
}

TEST(EarlyUpdate, DoesNotEndWithAnotherOptimizer) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    ToyRank rank(world, {}, {.numel = 40, .poison = false});
    auto optimizer = std::make_unique<Sgd>(rank.fsdp, SgdOptions{});
    auto next = std::make_unique<Sgd>(rank.fsdp, SgdOptions{});
    next->step_in_backward(0.1);
    optimizer = std::move(next);
    const std::vector<float> before = rank.values();
    rank.fsdp.begin_step();
    rank.tape.backward(rank.loss());
    rank.fsdp.finish_step();
    EXPECT_NE(rank.values(), before);
    EXPECT_EQ(optimizer->num_steps(), 1);
  });
}

// A hook that counts.
class Counting : public Reducer {
 public:
  struct Counts {
    int reduces = 0, lasts = 0, finishes = 0;
  };
  Counting(const ReducerContext& context, Counts& counts)
      : Reducer(context), inner_(make_reducer(context)), counts_(counts) {
    sum_ = inner_->sum();
  }
  void begin_step() override { inner_->begin_step(); }
  void reduce(const Tensor& in, const engine::Event& ready, bool is_last) override {
    ++counts_.reduces;
    counts_.lasts += is_last ? 1 : 0;
    inner_->reduce(in, ready, is_last);
  }
  void finish() override {
    ++counts_.finishes;
    inner_->finish();
  }

 private:
  std::unique_ptr<Reducer> inner_;
  Counts& counts_;
};

TEST(EarlyUpdate, FinishesEachReducerOnce) {
  auto groups = comm::make_threads_world(1);
  Counting::Counts counts;
  ToyRank rank(*groups.front(),
               {.reducer = [&](const ReducerContext& c) -> std::unique_ptr<Reducer> {
                 return std::make_unique<Counting>(c, counts);
               }},
               {.numel = 40, .poison = false});
  Sgd sgd(rank.fsdp, {});
  sgd.step_in_backward(0.1);
  rank.fsdp.begin_step(2);
  const auto pass = [&] { rank.tape.backward(rank.loss(0)); };
  pass();
  rank.fsdp.next_micro_step();
  pass();
  rank.fsdp.finish_step();
  EXPECT_EQ(counts.reduces, 8);
  EXPECT_EQ(counts.lasts, 4);
  EXPECT_EQ(counts.finishes, 4);
}

TEST(EarlyUpdate, CountsItsStepsAndKnowsItsGroups) {
  const auto run = [](bool early) {
    std::vector<float> result;
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, {}, {.blocks = 2, .numel = 40, .poison = false});
      AdamW adamw(rank.fsdp, {.groups = {{.name = "slow",
                                          .parameters = {"h.0.weight", "h.1.bias"},
                                          .lr_scale = 0.1,
                                          .weight_decay = 0.3}}});
      for (int step = 0; step < 3; ++step) {
        // Mixed: a step of either kind follows one of the other.
        const bool is_early = early && step != 1;
        if (is_early) adamw.step_in_backward(0.1 + step);
        rank.fsdp.begin_step();
        rank.tape.backward(rank.loss(0.01f * static_cast<float>(step + 1)));
        rank.fsdp.finish_step();
        if (!is_early) adamw.step(0.1 + step);
      }
      EXPECT_EQ(adamw.num_steps(), 3);
      const std::vector<float> mine = rank.values(&adamw);
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(EarlyUpdate, IsDoneWhenTheStepIsFinished) {
  std::vector<float> values[2];
  for (const bool early : {false, true}) {
    auto groups = comm::make_threads_world(1);
    ToyRank rank(*groups.front(), {.placement = Placement::preset("ddp")},
                 {.blocks = 2, .numel = 100, .poison = false});
    Slow slow(rank.fsdp, [](const std::string&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    });
    if (early) slow.step_in_backward(0.1);
    rank.fsdp.begin_step();
    const std::vector<float> x(100, 0.5f);
    rank.tape.backward(rank.loss(0.5f));
    rank.fsdp.finish_step();
    if (!early) slow.step(0.1);
    // Nothing writes what is loaded now.
    const auto& last = *rank.model.layers.front();
    rank.fsdp.load(last.weight, x);
    rank.fsdp.parameters_changed();
    EXPECT_EQ(rank.fsdp.full_parameter(last.weight), x);
    values[early ? 1 : 0] = rank.fsdp.full_parameter(last.bias);
  }
  EXPECT_EQ(values[1], values[0]);
}

TEST(EarlyUpdate, TakesNoMoreMemoryThanAStepAfterBackward) {
  const auto peak = [](bool early) {
    auto groups = comm::make_threads_world(1);
    ToyRank rank(*groups.front(), {}, {.blocks = 4, .numel = 1000, .poison = false});
    Sgd sgd(rank.fsdp, {.momentum = 0.9});
    for (int step = 0; step < 2; ++step) {
      if (early) sgd.step_in_backward(0.1);
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss(0));
      rank.fsdp.finish_step();
      if (!early) sgd.step(0.1);
    }
    return rank.memory.stats().peak_nbytes;
  };
  EXPECT_EQ(peak(true), peak(false));
}

TEST(EarlyUpdateErrors, SayWhatIsExpected) {
  auto groups = comm::make_threads_world(1);
  ToyRank rank(*groups.front(), {}, {.blocks = 2, .numel = 40, .poison = false});
  Sgd sgd(rank.fsdp, {});
  const auto pass = [&] { rank.tape.backward(rank.loss(0)); };
  const auto early = [&] { return error_of<InvalidArgument>([&] { sgd.step_in_backward(0.1); }); };
  rank.fsdp.begin_step();
  EXPECT_TRUE(has(early(), {"before begin_step()", "got it inside a step"}));
  pass();
  rank.fsdp.finish_step();
  EXPECT_TRUE(has(early(), {"expected step() or cancel_step()", "got neither"}));
  rank.fsdp.cancel_step();
  rank.fsdp.begin_step();
  pass();
  rank.fsdp.finish_step();
  sgd.step(0.1);
  sgd.step_in_backward(0.1);
  EXPECT_TRUE(has(early(), {"got two"}));
  rank.fsdp.begin_step();
  rank.fsdp.cancel_step();  // nothing is updated yet
  EXPECT_EQ(sgd.num_steps(), 1);
  sgd.step_in_backward(0.1);
  rank.fsdp.begin_step();
  pass();
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.cancel_step(); }),
                  {"expected finish_step()", "got cancel_step()"}));
  rank.fsdp.finish_step();
  EXPECT_EQ(sgd.num_steps(), 2);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { sgd.step(0.1); }), {"finish_step() before each"}));
}

// After the last backward some parameters are those of the next step, on some ranks. An evaluation
// would see a mixture, and leave what it gathered to the next step (hfsdp).
TEST(EarlyUpdateErrors, AnEvaluationAfterTheLastBackwardIsRefused) {
  constexpr int kRanks = 4;
  for (const std::string& name : Placement::preset_names()) {
    for (const UpdateGathers gathers : kBoth) {
      const FsdpOptions options{.placement = Placement::preset(name)};
      comm::run_ranks(kRanks, {}, [&](ProcessGroup& world) {
        ToyRank rank(world, options, {.numel = 70, .poison = false});
        Sgd sgd(rank.fsdp, {.momentum = 0.9});
        const Tensor x = rank.input();
        const auto evaluate = [&] {
          rank.tape.no_grad([&] { return rank.model.loss(rank.tape, x); });
        };
        sgd.step_in_backward(0.1, gathers);
        rank.fsdp.begin_step(2);
        rank.tape.backward(rank.model.loss(rank.tape, x));
        evaluate();
        rank.fsdp.next_micro_step({});
        const Tensor loss = rank.model.loss(rank.tape, x);
        evaluate();
        rank.tape.backward(loss);
        EXPECT_TRUE(has(error_of<InvalidArgument>(evaluate),
                        {"expected finish_step()", "a forward of 'h.", "evaluate before"}))
            << name;
      });
    }
  }
}

TEST(EarlyUpdateErrors, UnusedParametersThatAreSkippedAreKnownTooLate) {
  auto groups = comm::make_threads_world(1);
  ToyRank rank(*groups.front(), {.unused_parameters = UnusedParameters::kSkip},
               {.blocks = 2, .numel = 40, .poison = false});
  Sgd sgd(rank.fsdp, {});
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { sgd.step_in_backward(0.1); }), {"kSkip"}));
}

TEST(EarlyUpdateErrors, RanksThatDifferAreNamed) {
  const std::string message = error_of<engine::CommError>([] {
    comm::run_ranks(2, {.deadline = std::chrono::seconds(20)}, [&](ProcessGroup& world) {
      ToyRank rank(world, {}, {.blocks = 2, .numel = 40, .poison = false});
      Sgd sgd(rank.fsdp, {});
      sgd.step_in_backward(world.rank() == 0 ? 0.1 : 0.2);
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss(0));
      rank.fsdp.finish_step();
    });
  });
  EXPECT_TRUE(has(message, {"lr 0.1", "lr 0.2", "in backward"}));
}

TEST(EarlyUpdateErrors, AGradientThatIsNotFiniteIsNamed) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    ToyRank rank(world, {}, {.blocks = 2, .numel = 40, .poison = false});
    Sgd sgd(rank.fsdp, {});
    sgd.step_in_backward(0.1);
    rank.fsdp.begin_step();
    const float first = world.rank() == 1 ? std::numeric_limits<float>::infinity() : 1;
    rank.tape.backward(rank.model.loss(rank.tape, rank.input(1, first)));
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { rank.fsdp.finish_step(); }),
                    {"expected finite gradients"}));
  });
}

}  // namespace
}  // namespace tessera::shard
