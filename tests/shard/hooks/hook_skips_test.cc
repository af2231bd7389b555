// Hooks that remember, and steps that count for nothing: skipped, given up, refused, or ended by an
// error.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "shard/joint_norm.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/hooks/hook_run.h"
#include "tests/shard/hooks/non_finite_hooks.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using testing::HookRank;
using testing::HookResult;
using testing::HookRun;
using testing::run_hook;

constexpr float kInf = std::numeric_limits<float>::infinity();

HookRun that_may_skip() {
  HookRun run;
  run.options.non_finite = NonFinite::kSkip;
  return run;
}

// What one rank remembers after `steps`.
std::vector<HookTensor> state_behind(const std::function<void(HookRank&, Sgd&)>& steps) {
  std::vector<HookTensor> state;
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const HookRun run = that_may_skip();
    HookRank one(world, run);
    Sgd sgd(one.fsdp, {});
    steps(one, sgd);
    state = save_hooks(one.fsdp);
  });
  return state;
}

TEST(HookSkips, AStepThatIsSkippedCountsForNothing) {
  for (const testing::NonFiniteCase& of_case : testing::non_finite_cases()) {
    testing::expect_as_if_it_had_not_been(of_case, testing::run_hook);
  }
}

// Nor does it matter that steps may be skipped, as long as none is.
TEST(HookSkips, AStepThatIsGivenUpCountsForNothing) {
  for (const std::string name : {"powersgd", "batched_powersgd"}) {
    for (const int start_step : {0, 1}) {
      for (const bool offloads : {false, true}) {
        HookRun run = testing::hook_run_of(name, 2);
        run.hook.powersgd.start_step = start_step;
        run.hook.powersgd.offload_error = offloads;
        const HookResult plain = run_hook(run);
        run.options.non_finite = NonFinite::kSkip;
        for (const bool gives_up : {false, true}) {
          run.gives_up = gives_up;
          const HookResult got = run_hook(run);
          EXPECT_EQ(got.state, plain.state) << name;
          EXPECT_EQ(got.gradients, plain.gradients) << name;
        }
      }
    }
  }
}

// Another model of the same training has a gradient that is not finite, so nothing is updated.
TEST(HookSkips, AStepThatOthersSkipCountsForNothing) {
  const auto train = [&](const std::vector<int>& steps, int bad_step) {
    std::vector<std::vector<HookTensor>> states;  // of rank 0
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      const HookRun run = that_may_skip();
      HookRun other = run;
      other.hook.kind = HookKind::kNone;
      other.shapes = {{5}};
      other.gradient = [&](int step, int rank, std::size_t) {
        return std::vector<float>(5, step == bad_step && rank == 1 ? kInf : 1.0f);
      };
      HookRank a(world, run), b(world, other);
      Sgd a_sgd(a.fsdp, {}), b_sgd(b.fsdp, {});
      for (const int step : steps) {
        a.fsdp.begin_step();
        b.fsdp.begin_step();
        a.backward(step);
        b.backward(step);
        const GradNorm norm = a.fsdp.finish_step(), others_norm = b.fsdp.finish_step();
        EXPECT_EQ(norm.not_finite(), "");
        const std::vector<NormPart> parts = {{a.fsdp, norm}, {b.fsdp, others_norm}};
        const JointNorm joint = joint_norm(world, parts);
        a_sgd.step(0.1, joint, 1);
        b_sgd.step(0.1, joint, 1);
        const std::vector<HookTensor> state = save_hooks(a.fsdp);
        if (world.rank() == 0) states.push_back(state);
      }
    });
    return states;
  };
  const auto got = train({0, 1, 2}, 1), without = train({0, 2}, 1), all = train({0, 1, 2}, 7);
  EXPECT_EQ(got[1], got[0]);
  EXPECT_EQ(got[2], without[1]);
  EXPECT_NE(all[1], all[0]);
}

TEST(HookSkips, AnUpdateCountsThoughNoStepIsGivenUpAfterIt) {
  const auto train = [](bool cancels) {
    return state_behind([=](HookRank& t, Sgd& sgd) {
      for (int step = 0; step < 2; ++step) {
        t.fsdp.begin_step();
        t.backward(step);
        sgd.step(0.1, t.fsdp.finish_step(), 1);
        if (!cancels) continue;
        t.fsdp.cancel_step();  // of nothing
        t.fsdp.begin_step();
        t.backward(step + 2);
        t.fsdp.finish_step();
        t.fsdp.cancel_step();
      }
    });
  };
  EXPECT_EQ(train(true), train(false));
}

// Hooks that trainable_changed() makes again were not part of the step before.
TEST(HookSkips, AStepThatWasGivenUpIsNotOfTheHooksAfterAChange) {
  const auto state_after = [](bool gives_up) {
    std::vector<HookTensor> state;
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      HookRun run = that_may_skip();
      run.hook.powersgd.error_feedback = run.hook.powersgd.warm_start = false;
      HookRank one(world, run);
      if (gives_up) {
        one.fsdp.begin_step();
        one.backward(0);
        one.fsdp.cancel_step();
      }
      one.fsdp.trainable_changed();
      state = save_hooks(one.fsdp);
    });
    return state;
  };
  EXPECT_EQ(state_after(true), state_after(false));
}

TEST(HookSkips, AStepThatIsRefusedCountsForNothing) {
  const auto train = [](bool refused) {
    return state_behind([=](HookRank& t, Sgd& sgd) {
      for (int step = 0; step < 2; ++step) {
        if (refused && step == 1) {
          EXPECT_NE(error_of<InvalidArgument>([&] { t.fsdp.begin_step(1, {.num_backwards = 0}); }),
                    "");
        }
        t.fsdp.begin_step();
        t.backward(step);
        sgd.step(0.1, t.fsdp.finish_step(), 1);
      }
    });
  };
  EXPECT_EQ(train(true), train(false));
}

TEST(HookSkips, WhatIsRememberedIsReadAfterAStep) {
  for (const NonFinite policy : {NonFinite::kThrow, NonFinite::kSkip}) {
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      HookRun run;
      run.shapes = {{32, 8}};
      run.options.non_finite = policy;
      HookRank t(world, run);
      // Errors of what may be skipped are there twice.
      const auto& hook = dynamic_cast<HookReducer&>(*t.fsdp.units().front()->reducer());
      EXPECT_EQ(hook.error_nbytes(false), 256 * 4 * (policy == NonFinite::kSkip ? 2 : 1));
      if (policy == NonFinite::kThrow) return;
      t.fsdp.begin_step();
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { save_hooks(t.fsdp); }),
                      {"expected finish_step() or cancel_step()", "1 of 1 micro-steps"}));
      t.fsdp.cancel_step();
      EXPECT_FALSE(save_hooks(t.fsdp).empty());
    });
  }
}

TEST(HookSkips, AStepThatEndsInAnErrorLeavesWhatIsFinite) {
  for (const testing::NonFiniteCase& of_case : testing::non_finite_cases()) {
    testing::expect_what_is_left_is_finite(of_case, /*num_gpus=*/0);
  }
}

// The strategy's reducer, and what it is told.
class Told final : public Reducer {
 public:
  Told(const ReducerContext& context, bool takes_back, std::vector<bool>& told)
      : Reducer(context), reducer_(make_reducer(context)), takes_back_(takes_back), told_(told) {}
  void begin_step() override { reducer_->begin_step(); }
  void reduce(const engine::Tensor& in, const engine::Event& ready, bool is_last) override {
    reducer_->reduce(in, ready, is_last);
  }
  void finish() override { reducer_->finish(); }
  bool takes_back() const override { return takes_back_; }
  void end_step(bool counts) override { told_.push_back(counts); }

 private:
  std::unique_ptr<Reducer> reducer_;
  bool takes_back_;
  std::vector<bool>& told_;
};

// Nobody waits for a norm for those that have nothing to take back, or where nothing is skipped.
TEST(HookSkips, WhoTakesStepsBackIsToldOnceOfEach) {
  const auto told_of = [](bool takes_back, NonFinite policy) {
    std::vector<bool> told;
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      const engine::Memory memory;
      const engine::Stream compute = engine::Stream::inline_cpu("compute");
      engine::Tape tape(memory, compute);
      testing::GivenGradients model(std::vector<engine::Shape>{{5}});
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
                {.non_finite = policy,
                 .reducer = [&](const ReducerContext& context) -> std::unique_ptr<Reducer> {
                   EXPECT_EQ(context.may_skip, policy == NonFinite::kSkip);
                   return std::make_unique<Told>(context, takes_back, told);
                 },
                 .reducer_text = "told"});
      for (const float value : {1.0f, policy == NonFinite::kSkip ? kInf : 2.0f, 3.0f}) {
        fsdp.begin_step();
        model.run(tape, [&](std::size_t) { return std::vector<float>(5, value); });
        fsdp.finish_step();
      }
      fsdp.settle_step();
      fsdp.settle_step();
    });
    return told;
  };
  EXPECT_EQ(told_of(true, NonFinite::kSkip), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(told_of(false, NonFinite::kSkip), std::vector<bool>());
  EXPECT_EQ(told_of(true, NonFinite::kThrow), std::vector<bool>());
}

}  // namespace
}  // namespace tessera::shard
