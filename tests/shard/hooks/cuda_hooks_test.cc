// Communication hooks on GPUs: what they send and remember is what the CPU's do, but for the order
// of sums in products; equal bits twice, on every rank and whatever is sharded; no error that is
// not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "engine/cuda.h"
#include "tests/shard/hooks/hook_run.h"
#include "tests/shard/hooks/non_finite_hooks.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using engine::DType;
using testing::hook_run_of;
using testing::HookResult;
using testing::HookRun;
using testing::normals;
using testing::run_hook;

// Not 0 where these tests can run.
int num_gpus() {
  const int count = engine::kCudaBuilt ? engine::cuda::num_devices() : 0;
  EXPECT_GT(count, 0) << "these tests need a GPU";
  return std::max(count, 1);
}

HookResult on_gpu(HookRun run) {
  run.num_gpus = num_gpus();
  return run_hook(run);
}

TEST(CudaHooks, SendAndRememberWhatTheCpuDoes) {
  for (const std::string& name : hook_names()) {
    for (const int ranks : {1, 2, 3}) {
      if (testing::kIsSlow && ranks != 3) continue;
      const HookRun run = hook_run_of(name, ranks);
      const HookResult expected = run_hook(run), got = on_gpu(run);
      // Without products there is one order of sums. f32 + powersgd differs by rounding errors of
      // products; a wire rounds what differs in the last place to another neighbour.
      const bool is_exact = !run.hook.compresses();
      const double bound = is_exact ? 0 : run.hook.wire == Wire::kF32 ? 2e-4 : 5e-2;
      for (std::size_t step = 0; step < 3; ++step) {
        for (std::size_t i = 0; i < run.shapes.size(); ++i) {
          const auto& a = got.gradients[0][step][i];
          const auto& b = expected.gradients[0][step][i];
          ASSERT_EQ(a.size(), b.size());
          for (std::size_t k = 0; k < a.size(); ++k) {
            ASSERT_LE(std::abs(a[k] - b[k]), bound)
                << name << " ranks " << ranks << " step " << step << " parameter " << i;
          }
        }
      }
    }
  }
}

TEST(CudaHooks, HaveTheSameBitsTwiceOnEveryRankAndUnderEveryStrategy) {
  for (const std::string name : {"f16+powersgd", "batched_powersgd", "f16", "powersgd"}) {
    if (testing::kIsSlow && name != "f16+powersgd") continue;
    HookRun run = hook_run_of(name, 4);
    const HookResult expected = on_gpu(run);
    for (const auto& sums : expected.sums) EXPECT_EQ(sums, expected.sums[0]) << name;
    for (const char* strategy : {"ddp", "zero3", "hsdp"}) {
      run.options.placement = Placement::preset(strategy);
      const HookResult got = on_gpu(run);
      EXPECT_EQ(got.gradients[0], expected.gradients[0]) << name << " " << strategy;
      EXPECT_EQ(got.state, expected.state) << name << " " << strategy;
    }
  }
}

TEST(CudaHooks, OffloadedAndResumedHaveTheSameBits) {
  HookRun run = hook_run_of("powersgd", 2);
  run.steps = 5;
  const HookResult whole = on_gpu(run);
  run.hook.powersgd.offload_error = true;
  const HookResult offloaded = on_gpu(run);
  EXPECT_EQ(offloaded.gradients, whole.gradients);
  EXPECT_EQ(offloaded.state, whole.state);
  run.steps = 2;
  run.first_step = 3;
  run.start = whole.state[2];
  EXPECT_EQ(on_gpu(run).state.back(), whole.state.back());
}

// The identity of powersgd_test.cc.
TEST(CudaHooks, KeepWhatTheyDoNotSendToTheBit) {
  HookRun run = hook_run_of("powersgd", 2);
  run.accum = 1;
  run.hook.powersgd.start_step = 0;
  run.hook.powersgd.low_rank.min_compression_rate = 0;
  const HookResult result = on_gpu(run);
  for (int step = 0; step < run.steps; ++step) {
    for (int rank = 0; rank < 2; ++rank) {
      const auto g =
          normals(240, static_cast<std::uint64_t>(1000 * step + 100 * rank));  // of parameter 0
      const auto now = result.error(step, "p0", rank);
      const auto old = step == 0 ? std::vector<float>(240) : result.error(step - 1, "p0", rank);
      const auto& d = result.gradients[0][std::size_t(step)][0];
      for (std::size_t k = 0; k < 240; ++k) ASSERT_EQ(now[k], (g[k] + old[k]) - d[k]) << k;
    }
  }
}

TEST(CudaHooks, RememberNothingThatIsNotFinite) {
  const std::vector<testing::NonFiniteCase> cases = testing::non_finite_cases();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (i % (testing::kIsSlow ? 13 : 7) != 0) continue;  // the CPU meets each
    testing::expect_as_if_it_had_not_been(cases[i], on_gpu);
    testing::expect_what_is_left_is_finite(cases[i], num_gpus());
  }
}

TEST(CudaKeptErrors, LeaveOutWhatIsNotFinite) {
  using Values = std::vector<float>;
  const engine::Stream stream = engine::Stream::cuda("compute", num_gpus() - 1);
  for (const bool in_place : {true, false}) {
    EXPECT_EQ(testing::kept_errors(stream, DType::kF32, 0, in_place), (Values{2, 3.4e38f, 7, 7}));
    EXPECT_EQ(testing::kept_errors(stream, DType::kBF16, 0, in_place), (Values{2, 7, 7, 7}));
    EXPECT_EQ(testing::kept_errors(stream, DType::kF32, 1, in_place), (Values{7, 7, 7, 7}));
  }
}

TEST(CudaHooks, FindAgainWhatZerosLost) {
  HookRun run{.ranks = 2, .steps = 5, .shapes = {{20, 12}, {1}}};
  run.hook.powersgd.error_feedback = false;
  run.gradient = [&](int step, int, std::size_t i) {
    std::vector<float> g(static_cast<std::size_t>(run.shapes[i].numel()));
    if (step < 2 || i == 1) return g;
    for (const std::uint64_t seed : {1, 3}) {
      const auto u = normals(20, seed), v = normals(12, seed + 1);
      for (std::size_t k = 0; k < g.size(); ++k) g[k] += u[k / 12] * v[k % 12];
    }
    return g;
  };
  const HookResult result = on_gpu(run);
  EXPECT_EQ(result.gradients[0][1][0], std::vector<float>(240));
  const auto want = run.gradient(4, 0, 0);
  for (std::size_t k = 0; k < want.size(); ++k) {
    EXPECT_NEAR(result.gradients[0][4][0][k], want[k], 2e-5);
  }
}

}  // namespace
}  // namespace tessera::shard
