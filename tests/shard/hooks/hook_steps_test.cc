// Communication hooks in steps of every shape: micro-steps that are not reduced, ranks without a
// batch, steps that are given up, sums that lie on the host, and delays on every stream.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "shard/hooks/half.h"
#include "shard/hooks/hooks.h"
#include "tests/shard/hooks/hook_run.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using testing::hook_run_of;
using testing::HookResult;
using testing::HookRun;
using testing::normals;
using testing::run_hook;

// Rank 0 always has a batch; the last rank has one less in each step, until none is left.
int fewer_and_fewer(int ranks, int rank, int step) {
  return rank + 1 < ranks ? 2 : std::max(0, 1 - step);
}

using Change = std::pair<const char*, std::function<void(HookRun&)>>;

const std::array<Change, 5> kSteps = {{
    {"two reductions", [](HookRun&) {}},
    {"one reduction of three", [](HookRun& run) { run.accum = 3, run.no_sync = true; }},
    {"a rank joins",
     [](HookRun& run) {
       run.num_batches = [n = run.ranks](int r, int step) { return fewer_and_fewer(n, r, step); };
     }},
    {"steps are given up", [](HookRun& run) { run.gives_up = true; }},
    {"a rank joins where one reduction is made",
     [](HookRun& run) {
       run.no_sync = true;
       run.num_batches = [n = run.ranks](int r, int step) { return fewer_and_fewer(n, r, step); };
     }},
}};

// What must not change a bit. Each of them meets each hook and each shape of step.
const std::array<Change, 8> kWays = {{
    {"zero3",
     [](HookRun& run) {
       run.options.placement = Placement::preset("zero3");
       run.options.reductions_in_flight = 0;
       run.options.offload.gradients = 0.37;
     }},
    {"zero3 kept, delays",
     [](HookRun& run) {
       run.options.placement = Placement::preset("shard_grad_op");
       run.options.offload = {.parameters = 0.5, .gradients = 1, .optimizer = 1, .threads = 2};
       run.options.delay_seed = 1;
     }},
    {"zero1, delays",
     [](HookRun& run) {
       run.options.placement = Placement::preset("zero1");
       run.options.reductions_in_flight = 3;
       run.options.delay_seed = 2;
     }},
    {"zero2, all sums on the host",
     [](HookRun& run) {
       run.options.placement = Placement::preset("zero2");
       run.options.offload.gradients = 1;
       run.options.delay_seed = 3;
     }},
    {"ddp, a part of the sums on the host",
     [](HookRun& run) { run.options.offload.gradients = 0.9; }},
    {"hsdp", [](HookRun& run) { run.options.placement = Placement::preset("hsdp"); }},
    {"hfsdp, delays",
     [](HookRun& run) {
       run.options.placement = Placement::preset("hfsdp");
       run.options.offload.gradients = 0.5;
       run.options.delay_seed = 5;
     }},
    {"hybrid_zero2, no poison",
     [](HookRun& run) {
       run.options.placement = Placement::preset("hybrid_zero2");
       run.options.prefetch = 0;
       run.poison = false;
     }},
}};

using Way = std::pair<std::string, HookRun>;

// Expects that all have the gradients and the state of the first.
void expect_equal_bits(const std::vector<Way>& ways) {
  const auto results =
      testing::concurrently(ways, [](const Way& way) { return run_hook(way.second); });
  for (std::size_t i = 1; i < ways.size(); ++i) {
    const std::string what = ways[0].first + ", " + ways[i].first;
    EXPECT_EQ(results[i].gradients, results[0].gradients) << what;
    EXPECT_EQ(results[i].state, results[0].state) << what;
  }
}

class HookSteps : public ::testing::TestWithParam<std::string> {};

TEST_P(HookSteps, HaveTheSameBitsHoweverTheyAreMade) {
  for (const auto& [steps, shape] : kSteps) {
    for (const int ranks : {3, 4}) {
      if (testing::kIsSlow && ranks == 3) continue;
      HookRun run = hook_run_of(GetParam(), ranks);
      shape(run);
      std::vector<Way> ways = {{fmt::format("{}, {} ranks", steps, ranks), run}};
      for (const auto& [way, change] : kWays) {
        HookRun other = run;
        change(other);
        const bool is_hybrid = std::string(way).starts_with("h");
        if (ranks == 3 && (is_hybrid || other.options.delay_seed > 2)) continue;
        ways.emplace_back(way, other);
      }
      expect_equal_bits(ways);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hooks, HookSteps,
                         ::testing::Values("bf16", "f16", "powersgd", "f16+powersgd",
                                           "batched_powersgd"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

// With across_replicas a rank multiplies its shard alone, so the bits are those of where shards are
// cut, here inside rows. hsdp and hybrid_zero2 cut alike, and so does hfsdp where padding for all
// ranks is no more than padding for those of a replica, as of these shapes.
const std::array<Change, 5> kWaysAcross = {{
    {"hsdp, delays, all sums on the host",
     [](HookRun& run) {
       run.options.offload = {.gradients = 1, .optimizer = 1};
       run.options.delay_seed = 1;
     }},
    {"hybrid_zero2, no poison",
     [](HookRun& run) {
       run.options.placement = Placement::preset("hybrid_zero2");
       run.options.prefetch = 0;
       run.poison = false;
     }},
    {"hybrid_zero2, delays, errors on the host",
     [](HookRun& run) {
       run.options.placement = Placement::preset("hybrid_zero2");
       run.options.reductions_in_flight = 3;
       run.options.delay_seed = 2;
       run.hook.powersgd.offload_error = true;
     }},
    {"hfsdp", [](HookRun& run) { run.options.placement = Placement::preset("hfsdp"); }},
    {"hfsdp, delays, a part of the sums on the host",
     [](HookRun& run) {
       run.options.placement = Placement::preset("hfsdp");
       run.options.offload.gradients = 0.5;
       run.options.delay_seed = 3;
     }},
}};

HookRun across_replicas(const char* hook) {
  HookRun run = hook_run_of(hook, 4);
  run.hook.powersgd.across_replicas = true;
  run.options.placement = Placement::preset("hsdp");
  return run;
}

TEST(HookSteps, AcrossReplicasHaveTheSameBitsWhereverShardsAreCutAlike) {
  for (const char* hook : {"f16+powersgd", "batched_powersgd"}) {
    for (const auto& [steps, shape] : kSteps) {
      HookRun run = across_replicas(hook);
      run.shapes = {{20, 15}, {7}, {9, 4, 10}, {50}, {6, 6}};
      shape(run);
      std::vector<Way> ways = {{fmt::format("{}, {}", hook, steps), run}};
      for (const auto& [way, change] : kWaysAcross) {
        HookRun other = run;
        change(other);
        ways.emplace_back(way, other);
      }
      expect_equal_bits(ways);
    }
  }
}

// 240 elements take 2 times 128: replicas of hsdp cut them in the middle; in those of hfsdp, where
// each of 4 ranks updates 128, the first rank has them all.
TEST(HookSteps, AcrossReplicasDifferByRoundingWhereShardsAreCutOtherwise) {
  for (const char* hook : {"powersgd", "batched_powersgd"}) {
    HookRun run = across_replicas(hook);
    const HookResult expected = run_hook(run);
    run.options.placement = Placement::preset("hfsdp");
    const HookResult got = run_hook(run);
    EXPECT_NE(got.state, expected.state) << "docs/hooks.md says otherwise";
    for (std::size_t step = 0; step < got.gradients[0].size(); ++step) {
      for (std::size_t i = 0; i < run.shapes.size(); ++i) {
        const std::vector<float>& a = got.gradients[0][step][i];
        const std::vector<float>& b = expected.gradients[0][step][i];
        ASSERT_EQ(a.size(), b.size());
        for (std::size_t k = 0; k < a.size(); ++k) ASSERT_NEAR(a[k], b[k], 2e-5) << hook;
      }
    }
  }
}

// Against values of our own
// -------------------------------------------------------------------------------------

float through_half(float x) { return Float16::from_float(x).to_float(); }

std::vector<float> given(const HookRun& run, int number, int rank, std::size_t i) {
  return normals(run.shapes[i].numel(), static_cast<std::uint64_t>(1000 * number + 100 * rank) + i);
}

TEST(HookSteps, WhatIsNotReducedIsAddedBeforeItIsRounded) {
  HookRun run = hook_run_of("f16", 2);
  run.no_sync = true;
  const HookResult got = run_hook(run);
  for (std::size_t i = 0; i < run.shapes.size(); ++i) {
    std::vector<float> mean(static_cast<std::size_t>(run.shapes[i].numel()));
    for (int rank = 0; rank < 2; ++rank) {
      const std::vector<float> first = given(run, 4, rank, i), second = given(run, 5, rank, i);
      for (std::size_t k = 0; k < mean.size(); ++k) mean[k] += through_half(first[k] + second[k]);
    }
    for (float& x : mean) x *= 0.25f;
    EXPECT_EQ(got.gradients[0].back()[i], mean) << i;
  }
}

// The mean is that over the batches there are, and a rank without one sends zeros.
TEST(HookSteps, ARankWithoutABatchAddsNothing) {
  for (const char* name : {"f16", "powersgd"}) {
    HookRun run = hook_run_of(name, 3);
    run.accum = 1;
    run.num_batches = [](int rank, int step) { return rank == 1 && step == 2 ? 0 : 1; };
    const HookResult got = run_hook(run);
    HookRun zeros = run;
    zeros.num_batches = {};
    zeros.gradient = [&](int number, int rank, std::size_t i) {
      std::vector<float> g = given(run, number, rank, i);
      if (rank == 1 && number == 2) g.assign(g.size(), 0);
      return g;
    };
    const HookResult expected = run_hook(zeros);
    EXPECT_EQ(got.state, expected.state) << name << ": it owes what it owed";
    EXPECT_EQ(got.sums, expected.sums) << name;
    for (int step = 0; step < 3; ++step) {
      const auto s = static_cast<std::size_t>(step);
      for (std::size_t i = 0; i < run.shapes.size(); ++i) {
        const std::vector<float>& mean = got.gradients[0][s][i];
        const std::vector<float>& of_three = expected.gradients[0][s][i];
        for (std::size_t k = 0; k < mean.size(); ++k) {
          EXPECT_FLOAT_EQ(mean[k], step == 2 ? of_three[k] * 1.5f : of_three[k]) << name;
        }
      }
    }
  }
}

// A step that was given up leaves nothing in a sum.
TEST(HookSteps, AStepThatWasGivenUpIsNotPartOfTheNext) {
  for (const char* name : {"bf16", "f16"}) {
    HookRun run = hook_run_of(name, 2);
    const HookResult expected = run_hook(run);
    run.gives_up = true;
    EXPECT_EQ(run_hook(run).gradients, expected.gradients) << name;
  }
}

}  // namespace
}  // namespace tessera::shard
