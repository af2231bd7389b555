// Steps of which one meets what is not finite, under every way to compress: neither errors nor the
// steps behind it keep anything of it, and other parameters' errors go on.
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

#include "tests/shard/hook_run.h"

namespace tessera::testing {

struct NonFiniteCase {
  std::string hook;
  float value;  ///< of a part of parameter 0 in step 1
  engine::DType error_dtype = engine::DType::kF32;
  bool across_replicas = false;
  bool offload_error = false;
  bool in_a_column = false;  ///< the value: then Q alone overflows, else P does

  std::string name() const {
    return fmt::format("{}, {}{}, errors in {}{}{}", hook, value, in_a_column ? " in a column" : "",
                       engine::name_of(error_dtype), across_replicas ? ", across replicas" : "",
                       offload_error ? ", offloaded" : "");
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
                         cases.size() % 5 < 2, in_a_column});
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

/// But for parameter 0, and the unit that it is alone in.
inline std::vector<shard::HookTensor> of_others(std::vector<shard::HookTensor> state) {
  std::erase_if(state, [](const auto& t) { return t.parameter == "p0" || t.parameter == "b0"; });
  return state;
}

/// `run_on` makes the runs: on the CPU or on a GPU.
inline void expect_nothing_is_kept(const NonFiniteCase& of_case,
                                   const std::function<HookResult(const HookRun&)>& run_on) {
  SCOPED_TRACE(of_case.name());
  HookRun run{.ranks = of_case.across_replicas ? 4 : 3, .steps = 4};
  set_hook(run.hook, of_case.hook);
  run.hook.powersgd.error_dtype = of_case.error_dtype;
  run.hook.powersgd.across_replicas = of_case.across_replicas;
  run.hook.powersgd.offload_error = of_case.offload_error;
  run.options.non_finite = shard::NonFinite::kSkip;
  if (of_case.across_replicas) {
    run.options.placement = shard::Placement::preset("hsdp");
    run.options.shard_ranks = 2;
  }
  const GradientOf usual = [shapes = run.shapes](int step, int rank, std::size_t i) {
    return normals(shapes[i].numel(), static_cast<std::uint64_t>(100 * step + 10 * rank) + i);
  };
  // What overflows in sums alone is on every rank.
  const bool on_all = std::isfinite(of_case.value);
  run.gradient = [&](int step, int rank, std::size_t i) {
    std::vector<float> g = usual(step, rank, i);
    if (step == 1 && i == 0 && (on_all || rank == 1)) {
      of_case.plant(g);
    }
    return g;
  };
  const HookResult got = run_on(run);
  EXPECT_EQ(got.not_finite[0], "");
  EXPECT_NE(got.not_finite[1].find("p0"), std::string::npos) << got.not_finite[1];
  EXPECT_EQ(got.not_finite[2] + got.not_finite[3], "");
  const int parts = of_case.across_replicas ? 2 : run.ranks;
  for (int part = 0; part < parts; ++part) {
    const std::vector<float> error = got.error(0, "p0", part);
    EXPECT_FALSE(error.empty());
    EXPECT_EQ(got.error(1, "p0", part), error) << "part " << part;
  }
  // Other parameters' are those behind the step, as if it had been made: what they sent is lost.
  HookRun fine = run;
  fine.gradient = usual;
  const HookResult of_fine = run_on(fine);
  for (std::size_t step = 1; step < got.state.size(); ++step) {
    EXPECT_EQ(of_others(got.state[step]), of_others(of_fine.state[step])) << "step " << step;
    for (std::size_t i = 1; step > 1 && i < run.shapes.size(); ++i) {
      EXPECT_EQ(got.gradients[0][step][i], of_fine.gradients[0][step][i]) << "step " << step;
    }
  }
  EXPECT_NE(of_others(got.state[1]), of_others(got.state[0])) << "they moved on";
  for (const auto& step : got.state) {
    for (const shard::HookTensor& t : step) {
      EXPECT_TRUE(std::ranges::all_of(t.values, [](float x) { return std::isfinite(x); }))
          << t.name << " " << t.parameter;
    }
  }
  // To parameter 0 the step might not have been, but for how often its Q was rounded.
  HookRun without = run;
  without.steps = 3;
  without.gradient = [&](int step, int rank, std::size_t i) {
    return usual(step == 0 ? 0 : step + 1, rank, i);
  };
  const HookResult expected = run_on(without);
  const double bound =
      run.hook.wire == shard::Wire::kF32 && of_case.error_dtype == engine::DType::kF32 ? 2e-4
                                                                                       : 5e-2;
  for (const std::size_t step : {2u, 3u}) {
    const std::vector<float>& a = got.gradients[0][step][0];
    const std::vector<float>& b = expected.gradients[0][step - 1][0];
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t k = 0; k < a.size(); ++k) {
      // Written so that what is not a number fails.
      ASSERT_TRUE(std::abs(a[k] - b[k]) <= bound)
          << "step " << step << ": " << a[k] << ", " << b[k];
    }
  }
}

}  // namespace tessera::testing
