// Every way to use a model, other than one forward and one backward as well, has the bits of plain
// data parallelism, whatever the strategy, number of ranks, prefetch depth and packing.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "shard/fsdp.h"
#include "tests/shard/usage_patterns.h"
#include "tests/testing/concurrently.h"
#include "tests/testing/covering.h"

namespace tessera::shard {
namespace {

using tessera::testing::concurrently;
using tessera::testing::CoveringRow;
using tessera::testing::PassFn;
using tessera::testing::Pattern;
using tessera::testing::patterns;
using tessera::testing::train_pattern;

using Training = testing::PatternTraining;

class UsagePatterns : public ::testing::TestWithParam<Pattern> {};

const std::array kRanks = {1, 3};
const std::array kStrategies = {"zero3", "shard_grad_op", "ddp"};
const std::array kPrefetches = {0, 1, 2};
const std::array<std::int64_t, 3> kPackings = {0, 500, 100000};

// Each pattern meets every pair of choices, and three of them that meet are others for the next.
TEST_P(UsagePatterns, HaveTheBitsOfPlainDataParallelism) {
  const Pattern& pattern = GetParam();
  static const std::vector<CoveringRow> rows = tessera::testing::covering_rows({2, 3, 3, 3}).rows;
  EXPECT_LE(rows.size(), 12u);
  Training reference{.ranks = 1, .accum = 3, .steps = 3, .num_backwards = pattern.num_backwards};
  reference.options.placement = Placement::preset("ddp");
  reference.options.prefetch = 0;
  const std::vector<float> expected = train_pattern(reference, pattern.run);
  static const std::vector<Pattern> all = patterns();
  const auto turn =
      static_cast<std::size_t>(std::ranges::find(all, pattern.name, &Pattern::name) - all.begin());
  for (const CoveringRow& row : rows) {
    const auto choice = [&](std::size_t column, const auto& levels, std::size_t shift) {
      return levels[(static_cast<std::size_t>(row[column]) + shift) % levels.size()];
    };
    Training run = reference;
    run.ranks = choice(0, kRanks, turn);
    run.accum = 3 / run.ranks;
    const char* const strategy = choice(1, kStrategies, 0);
    run.options.placement = Placement::preset(strategy);
    run.options.prefetch = choice(2, kPrefetches, turn);
    run.options.unit_min_numel = choice(3, kPackings, turn / 3);
    EXPECT_EQ(train_pattern(run, pattern.run), expected)
        << strategy << " ranks " << run.ranks << " prefetch " << run.options.prefetch << " packing "
        << run.options.unit_min_numel;
  }
}

// The schedule must order slots, gathers and reductions by events alone: here the host runs ahead
// of compute, as it does on a device, and every stream of every rank is late at other times.
TEST_P(UsagePatterns, HaveTheSameBitsWithAsynchronousComputeAndDelays) {
  const Pattern& pattern = GetParam();
  Training run{.ranks = 3, .accum = 2, .steps = 2, .num_backwards = pattern.num_backwards};
  run.options.placement = Placement::preset("ddp");
  const std::vector<float> expected = train_pattern(run, pattern.run);
  run.is_async = true;
  struct Choice {
    const char* strategy;
    int prefetch;
    bool poison;  // poisoning a slot waits for its last use as well, and so hides other waits
  };
  const std::vector<Choice> choices = {{"zero3", 0, false},
                                       {"zero3", 1, false},
                                       {"zero3", 1, true},
                                       {"shard_grad_op", 1, false},
                                       {"ddp", 1, true}};
  const auto all = concurrently(choices, [&](const Choice& choice) {
    Training late = run;
    late.options.placement = Placement::preset(choice.strategy);
    late.options.prefetch = choice.prefetch;
    late.poison = choice.poison;
    return train_pattern(late, pattern.run);
  });
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const auto& [strategy, prefetch, poison] = choices[i];
    EXPECT_EQ(all[i], expected) << strategy << " prefetch " << prefetch << " poison " << poison;
  }
}

INSTANTIATE_TEST_SUITE_P(All, UsagePatterns, ::testing::ValuesIn(patterns()),
                         [](const auto& info) { return info.param.name; });

TEST(UsagePatterns, FiveAndSevenRanksEqualOne) {
  const PassFn plain = patterns().front().run;
  const std::vector<float> expected = train_pattern({.ranks = 1, .accum = 35, .steps = 2}, plain);
  for (const char* strategy : {"zero3", "shard_grad_op", "ddp"}) {
    for (const int ranks : {5, 7}) {
      Training run{.ranks = ranks, .accum = 35 / ranks, .steps = 2};
      run.options.placement = Placement::preset(strategy);
      EXPECT_EQ(train_pattern(run, plain), expected) << strategy << " ranks " << ranks;
    }
  }
}

}  // namespace
}  // namespace tessera::shard
