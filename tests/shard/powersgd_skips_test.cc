// PowerSGD and steps that count for nothing: skipped, given up, refused, or ended by an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "shard/joint_norm.h"
#include "shard/sgd.h"
#include "tests/shard/hook_run.h"
#include "tests/shard/non_finite_hooks.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using testing::HookResult;
using testing::HookRun;
using testing::normals;
using testing::run_hook;

constexpr float kInf = std::numeric_limits<float>::infinity();

// One rank of a run, step by step; the hook's options are those of `run`.
struct Training {
  Training(comm::ProcessGroup& world, const HookRun& run, NonFinite policy = NonFinite::kSkip)
      : run(run),
        rank(world.rank()),
        compute(engine::Stream::inline_cpu("compute")),
        memory(compute),
        tape(memory, compute),
        model(run.shapes),
        fsdp(world, memory, compute, model.blocks(), &model.root, options(run, policy)),
        sgd(fsdp, {}) {}

  static FsdpOptions options(const HookRun& run, NonFinite policy) {
    FsdpOptions options = run.options;
    options.non_finite = policy;
    options.reducer = make_hook(run.hook);
    options.reducer_text = describe(run.hook);
    return options;
  }
  std::vector<float> gradient(int step, std::size_t i) const {
    if (run.gradient) return run.gradient(step, rank, i);
    return normals(run.shapes[i].numel(), static_cast<std::uint64_t>(1000 * step + 100 * rank) + i);
  }
  void backward(int step) {
    fsdp.begin_step();
    model.run(tape, [&](std::size_t i) { return gradient(step, i); });
  }

  const HookRun& run;
  int rank;
  engine::Stream compute;
  engine::Memory memory;
  engine::Tape tape;
  testing::GivenGradients model;
  Fsdp fsdp;
  Sgd sgd;
};

// What one rank remembers behind `steps`.
template <class Steps>
std::vector<HookTensor> state_behind(Steps steps) {
  std::vector<HookTensor> state;
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const HookRun run;
    Training training(world, run);
    steps(training);
    state = save_hooks(training.fsdp);
  });
  return state;
}

TEST(PowerSgdSkips, AStepThatIsSkippedCountsForNothing) {
  for (const testing::NonFiniteCase& of_case : testing::non_finite_cases()) {
    testing::expect_as_if_it_had_not_been(of_case, testing::run_hook);
  }
}

// Nor does it matter that steps may be skipped, as long as none is.
TEST(PowerSgdSkips, AStepThatIsGivenUpCountsForNothing) {
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
TEST(PowerSgdSkips, AStepThatOthersSkipCountsForNothing) {
  const auto train = [&](const std::vector<int>& steps, int bad_step) {
    std::vector<std::vector<HookTensor>> states;  // of rank 0
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      const HookRun run;
      HookRun other;
      other.hook.kind = HookKind::kNone;
      other.shapes = {{5}};
      other.gradient = [&](int step, int rank, std::size_t) {
        return std::vector<float>(5, step == bad_step && rank == 1 ? kInf : 1.0f);
      };
      Training a(world, run), b(world, other);
      for (const int step : steps) {
        a.backward(step);
        b.backward(step);
        const GradNorm norm = a.fsdp.finish_step(), others_norm = b.fsdp.finish_step();
        EXPECT_EQ(norm.not_finite(), "");
        const std::vector<NormPart> parts = {{a.fsdp, norm}, {b.fsdp, others_norm}};
        const JointNorm joint = joint_norm(world, parts);
        a.sgd.step(0.1, joint, 1);
        b.sgd.step(0.1, joint, 1);
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

TEST(PowerSgdSkips, AnUpdateCountsThoughNoStepIsGivenUpBehindIt) {
  const auto train = [](bool cancels) {
    return state_behind([=](Training& t) {
      for (int step = 0; step < 2; ++step) {
        t.backward(step);
        t.sgd.step(0.1, t.fsdp.finish_step(), 1);
        if (!cancels) continue;
        t.fsdp.cancel_step();  // of nothing
        t.backward(step + 2);
        t.fsdp.finish_step();
        t.fsdp.cancel_step();
      }
    });
  };
  EXPECT_EQ(train(true), train(false));
}

TEST(PowerSgdSkips, AStepThatIsRefusedCountsForNothing) {
  const auto train = [](bool refused) {
    return state_behind([=](Training& t) {
      for (int step = 0; step < 2; ++step) {
        if (refused && step == 1) {
          EXPECT_NE(error_of<InvalidArgument>([&] { t.fsdp.begin_step(1, {.num_backwards = 0}); }),
                    "");
        }
        t.backward(step);
        t.sgd.step(0.1, t.fsdp.finish_step(), 1);
      }
    });
  };
  EXPECT_EQ(train(true), train(false));
}

TEST(PowerSgdSkips, WhatIsRememberedIsReadBehindAStep) {
  for (const NonFinite policy : {NonFinite::kThrow, NonFinite::kSkip}) {
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      HookRun run;
      run.shapes = {{32, 8}};
      Training t(world, run, policy);
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

// Nothing takes back what it did, so it must not do what is not to be kept.
TEST(PowerSgdSkips, AStepThatEndsInAnErrorLeavesNothingThatIsNotFinite) {
  for (const testing::NonFiniteCase& of_case : testing::non_finite_cases()) {
    if (of_case.across_replicas) continue;
    SCOPED_TRACE(of_case.name());
    HookRun run;
    set_hook(run.hook, of_case.hook);
    run.hook.powersgd.error_dtype = of_case.error_dtype;
    run.hook.powersgd.offload_error = of_case.offload_error;
    run.gradient = [&](int step, int rank, std::size_t i) {
      std::vector<float> g =
          normals(run.shapes[i].numel(), static_cast<std::uint64_t>(1000 * step + 100 * rank) + i);
      if (step == 1 && i == 0) of_case.plant(g);
      return g;
    };
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      Training t(world, run, NonFinite::kThrow);
      t.backward(0);
      t.sgd.step(0.1, t.fsdp.finish_step(), 1);
      const std::vector<HookTensor> before = save_hooks(t.fsdp);
      t.backward(1);
      EXPECT_TRUE(has(error_of<InvalidArgument>([&] { t.fsdp.finish_step(); }), {"p0"}));
      const std::vector<HookTensor> after = save_hooks(t.fsdp);
      ASSERT_EQ(after.size(), before.size());
      for (std::size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(std::ranges::all_of(after[i].values, [](float x) { return std::isfinite(x); }))
            << after[i].name << " " << after[i].parameter;
        if (after[i].name != "powersgd.error") continue;
        EXPECT_EQ(after[i].values == before[i].values, after[i].parameter == "p0")
            << after[i].parameter;
      }
    });
  }
}

}  // namespace
}  // namespace tessera::shard
