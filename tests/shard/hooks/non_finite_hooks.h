// Steps of which one meets what is not finite, under every way to compress: what is remembered
// after it, and all that follows, is as if it had not been.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/shard/hooks/hook_run.h"
#include "tests/testing/errors.h"

namespace tessera::testing {

struct NonFiniteCase {
  std::string hook;
  float value;  ///< of a part of parameter 0 in the last micro-step of step 1
  engine::DType error_dtype = engine::DType::kF32;
  bool across_replicas = false;
  bool offload_error = false;
  bool in_a_column = false;  ///< the value: then Q alone overflows, else P does
  int accum = 1;

  std::string name() const {
    return fmt::format("{}, {}{}, errors in {}{}{}, micro-steps {}", hook, value,
                       in_a_column ? " in a column" : "", engine::name_of(error_dtype),
                       across_replicas ? ", across replicas" : "",
                       offload_error ? ", offloaded" : "", accum);
  }
  /// Puts the value into the gradient of parameter 0.
  void plant(std::vector<float>& g) const {
    if (!in_a_column) {
      std::fill(g.begin() + 3, g.begin() + 30, value);
      return;
    }
    const std::size_t cols = hook.find("batched") == std::string::npos ? 10 : 16;
    for (std::size_t k = 0; k < g.size(); k += cols) g[k] = value;
  }
};

inline std::vector<NonFiniteCase> non_finite_cases() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<NonFiniteCase> cases;
  for (const std::string& name : shard::hook_names()) {
    if (name.find("powersgd") == std::string::npos) continue;
    const auto add = [&](float value, bool in_a_column) {
      for (const bool across : {false, true}) {
        const bool is_bf16 = cases.size() % 3 == 1;
        cases.push_back({name, value, is_bf16 ? engine::DType::kBF16 : engine::DType::kF32, across,
                         cases.size() % 5 < 2, in_a_column, cases.size() % 7 < 3 ? 2 : 1});
      }
    };
    for (const float value : {kNan, kInf, -kInf, 3e38f}) add(value, false);
    if (!name.starts_with("f16")) continue;
    // Finite but for the wire, which ends at 65504.
    add(1e5f, false);
    add(2e4f, true);
  }
  return cases;
}

inline std::vector<float> usual_gradient(int micro, int rank, std::size_t i) {
  return normals(HookRun().shapes[i].numel(),
                 static_cast<std::uint64_t>(100 * micro + 10 * rank) + i);
}

/// The run of a case, whose gradients are usual_gradient() but for what the case plants.
inline HookRun run_of(const NonFiniteCase& of_case) {
  HookRun run{.ranks = of_case.across_replicas ? 4 : 3, .steps = 4, .accum = of_case.accum};
  set_hook(run.hook, of_case.hook);
  run.hook.powersgd.error_dtype = of_case.error_dtype;
  run.hook.powersgd.across_replicas = of_case.across_replicas;
  run.hook.powersgd.offload_error = of_case.offload_error;
  if (of_case.across_replicas) {
    run.options.placement = shard::Placement::preset("hsdp");
  }
  // What overflows in sums alone is on every rank.
  const bool on_all = std::isfinite(of_case.value);
  const int bad_micro = 2 * run.accum - 1;  // the last of step 1
  run.gradient = [=](int micro, int rank, std::size_t i) {
    std::vector<float> g = usual_gradient(micro, rank, i);
    if (micro == bad_micro && i == 0 && (on_all || rank == 1)) of_case.plant(g);
    return g;
  };
  return run;
}

/// A step that ends in an error, so that nothing takes back what it did, leaves what is finite, the
/// errors of parameter 0 as they were, and other parameters' after it. `num_gpus`: as of HookRun.
inline void expect_what_is_left_is_finite(const NonFiniteCase& of_case, int num_gpus) {
  SCOPED_TRACE(of_case.name());
  HookRun run = run_of(of_case);
  run.num_gpus = num_gpus;
  comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& world) {
    HookRank one(world, run);
    const auto step = [&](int number) {
      for (int micro = 0; micro < run.accum; ++micro) {
        micro == 0 ? one.fsdp.begin_step(run.accum) : one.fsdp.next_micro_step();
        one.backward(number * run.accum + micro);
      }
    };
    step(0);
    one.fsdp.finish_step();
    const std::vector<shard::HookTensor> before = save_hooks(one.fsdp);
    step(1);
    // On the CPU by the first call, on a GPU by the second.
    EXPECT_TRUE(
        has(error_of<engine::InvalidArgument>([&] { one.fsdp.finish_step().value(); }), {"p0"}));
    const std::vector<shard::HookTensor> after = save_hooks(one.fsdp);
    ASSERT_EQ(after.size(), before.size());
    for (std::size_t i = 0; i < after.size(); ++i) {
      EXPECT_TRUE(std::ranges::all_of(after[i].values, [](float x) { return std::isfinite(x); }))
          << after[i].name << " " << after[i].parameter;
      if (after[i].name != "powersgd.error") continue;
      // The first of two micro-steps is fine.
      const bool stays = after[i].parameter == "p0" && run.accum == 1;
      EXPECT_EQ(after[i].values == before[i].values, stays) << after[i].parameter;
    }
  });
}

/// `run_on` makes the runs: on the CPU or on a GPU.
inline void expect_as_if_it_had_not_been(const NonFiniteCase& of_case,
                                         const std::function<HookResult(const HookRun&)>& run_on) {
  SCOPED_TRACE(of_case.name());
  HookRun run = run_of(of_case);
  run.options.non_finite = shard::NonFinite::kSkip;
  const HookResult got = run_on(run);
  EXPECT_EQ(got.not_finite[0], "");
  EXPECT_NE(got.not_finite[1].find("p0"), std::string::npos) << got.not_finite[1];
  EXPECT_EQ(got.not_finite[2] + got.not_finite[3], "");
  const int parts = of_case.across_replicas ? 2 : run.ranks;
  for (int part = 0; part < parts; ++part) {
    EXPECT_FALSE(got.error(0, "p0", part).empty()) << "part " << part;
  }
  EXPECT_EQ(got.state[1], got.state[0]) << "the step counts for nothing";
  HookRun without = run;
  without.steps = 3;
  without.gradient = [&](int micro, int rank, std::size_t i) {
    return usual_gradient(micro < run.accum ? micro : micro + run.accum, rank, i);
  };
  const HookResult expected = run_on(without);
  EXPECT_NE(expected.state[1], expected.state[0]) << "it moves on";
  for (const std::size_t step : {2u, 3u}) {
    EXPECT_EQ(got.state[step], expected.state[step - 1]) << "step " << step;
    EXPECT_EQ(got.gradients[0][step], expected.gradients[0][step - 1]) << "step " << step;
  }
}

}  // namespace tessera::testing
