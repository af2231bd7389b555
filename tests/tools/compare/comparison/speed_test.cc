// Which configurations are told apart: equal ones hardly ever, others with enough rounds.
#include "tools/compare/comparison/speed.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "engine/philox.h"

namespace tessera::tools {
namespace {

TEST(Speed, RoundsThatAreNeededGrowWithTheNumberOfPairs) {
  // 2 / 2^rounds must not exceed 1/20 by the number of pairs: 1, 3, 6, 28, 32640.
  EXPECT_EQ(rounds_needed(2), 6);
  EXPECT_EQ(rounds_needed(3), 7);
  EXPECT_EQ(rounds_needed(4), 8);
  EXPECT_EQ(rounds_needed(8), 11);
  EXPECT_EQ(rounds_needed(256), 21);
}

TEST(Speed, AnIntervalLiesBetweenTwoOfTheSortedRatios) {
  const std::vector<double> ones(20, 1.0);
  const auto interval = [&](std::vector<double> ratios, std::size_t num_configurations) {
    const std::span<const double> below(ones.data(), ratios.size());
    return ratio_interval(ratios, below, num_configurations);
  };
  EXPECT_FALSE(interval({1, 2, 3, 4, 5}, 2).has_value());
  const RatioInterval six = interval({5, 1, 6, 2, 4, 3}, 2).value();
  EXPECT_EQ(six.low, 1);
  EXPECT_EQ(six.middle, 3.5);
  EXPECT_EQ(six.high, 6);
  EXPECT_FALSE(interval({5, 1, 6, 2, 4, 3}, 3).has_value());
  // P(1 head or none of 9) is 10/512, and 2 of 12 79/4096: both below 1/40. 8 tosses, 9/256, not.
  const RatioInterval eight = interval({1, 2, 3, 4, 5, 6, 7, 8}, 2).value();
  EXPECT_EQ(eight.low, 1);
  const RatioInterval nine = interval({1, 2, 3, 4, 5, 6, 7, 8, 9}, 2).value();
  EXPECT_EQ(nine.low, 2);
  EXPECT_EQ(nine.middle, 5);
  EXPECT_EQ(nine.high, 8);
  const RatioInterval twelve = interval({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 2).value();
  EXPECT_EQ(twelve.low, 3);
  EXPECT_EQ(twelve.high, 10);
}

TEST(Speed, TheFastestIsNamedWithThoseThatMayBeAsFast) {
  const std::vector<double> slow(8, 50), fast = {101, 102, 103, 104, 105, 106, 107, 108},
                                         near = {102, 101, 104, 103, 106, 105, 108, 107};
  const Speeds all = compare_speeds({slow, near, {}, fast, slow});
  EXPECT_EQ(all.num_rounds, 8);
  EXPECT_EQ(all.rounds_needed, 8) << "of the four that have a speed";
  ASSERT_TRUE(all.fastest.has_value());
  EXPECT_EQ(all.fastest, 1u) << "the first of two equal medians";
  EXPECT_EQ(all.as_fast, std::vector<std::size_t>{3});
  EXPECT_TRUE(all.faster[1][0] && all.faster[3][0] && all.faster[1][4]);
  EXPECT_FALSE(all.faster[0][1] || all.faster[1][3] || all.faster[3][1] || all.faster[0][4]);
  EXPECT_FALSE(all.faster[1][2] || all.faster[2][1]);
  EXPECT_DOUBLE_EQ(all.fastest_ratio[0]->low, 101.0 / 50);
  EXPECT_DOUBLE_EQ(all.fastest_ratio[0]->high, 108.0 / 50);
  EXPECT_FALSE(all.fastest_ratio[1].has_value() || all.fastest_ratio[2].has_value());
  // Too few rounds to say, or one alone.
  const Speeds few = compare_speeds({std::vector<double>(5, 1), std::vector<double>(9, 2)});
  EXPECT_EQ(few.num_rounds, 5);
  EXPECT_FALSE(few.fastest.has_value() || few.faster[1][0] || few.fastest_ratio[0].has_value());
  EXPECT_EQ(compare_speeds({{1, 2}, {}}).rounds_needed, 0);
}

TEST(Speed, AnOrderIsDrawnForEachRoundButTheFirst) {
  EXPECT_EQ(order_of_round(1, 4), (std::vector<std::size_t>{0, 1, 2, 3}));
  EXPECT_EQ(order_of_round(5, 1), std::vector<std::size_t>{0});
  std::set<std::vector<std::size_t>> orders;
  std::vector<int> first(4, 0);  // how often each begins
  for (std::int64_t round = 2; round <= 401; ++round) {
    std::vector<std::size_t> order = order_of_round(round, 4);
    EXPECT_EQ(order, order_of_round(round, 4));
    orders.insert(order);
    ++first[order.front()];
    std::ranges::sort(order);
    EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 2, 3}));
  }
  EXPECT_EQ(orders.size(), 24u);
  for (const int n : first) EXPECT_NEAR(n, 100, 35);
}

// Simulated tables
// ---------------------------------------------------------------------------------

// What multiplies the time of a training: of a table, at its place in the order of all trainings.
using Noise = std::function<double(const engine::RandomStream& random, std::size_t place)>;

double steady(const engine::RandomStream& random, std::size_t place) {
  return std::exp(0.02 * double{random.normal(place)});
}
// The machine slows down all the time, by 60 % over 88 trainings.
double drifting(const engine::RandomStream& random, std::size_t place) {
  return steady(random, place) * (1 + 0.007 * static_cast<double>(place));
}
// One training of ten takes half as long again.
double with_outliers(const engine::RandomStream& random, std::size_t place) {
  return steady(random, place) * (random.uniform(1000 + place) < 0.1F ? 1.5 : 1);
}
// One of two speeds, and next to nothing between.
double of_two_modes(const engine::RandomStream& random, std::size_t place) {
  return (random.uniform(place) < 0.5F ? 1.0 : 1.1) *
         (1 + 1e-4 * double{random.uniform(500 + place)});
}

// Tokens/s of trainings that take `ms` without noise.
std::vector<std::vector<double>> simulated(const std::vector<double>& ms, std::int64_t num_rounds,
                                           const Noise& noise, std::uint64_t table, bool in_order) {
  const engine::RandomStream random{.seed = 7, .stream = table};
  std::vector<std::vector<double>> speeds(ms.size());
  std::size_t place = 0;
  for (std::int64_t round = 1; round <= num_rounds; ++round) {
    // Each table has rounds of its own, as each has orders of its own.
    const std::int64_t drawn = round == 1 ? 1 : round + static_cast<std::int64_t>(table) * 1000;
    for (const std::size_t i : order_of_round(in_order ? 1 : drawn, ms.size())) {
      speeds[i].push_back(1e5 / (ms[i] * noise(random, place++)));
    }
  }
  return speeds;
}

bool tells_any_apart(const Speeds& speeds) {
  return std::ranges::any_of(speeds.faster,
                             [](const auto& row) { return std::ranges::count(row, true) > 0; });
}

// How many of 100 tables tell some of `num` equal configurations apart.
double percent_told_apart(std::size_t num, std::int64_t num_rounds, const Noise& noise,
                          bool in_order = false) {
  constexpr int kNumTables = 600;
  int told = 0;
  for (int table = 0; table < kNumTables; ++table) {
    const auto speeds = simulated(std::vector<double>(num, 40.0), num_rounds, noise,
                                  static_cast<std::uint64_t>(table), in_order);
    told += tells_any_apart(compare_speeds(speeds)) ? 1 : 0;
  }
  return 100.0 * told / kNumTables;
}

TEST(Speed, OneProgramUnderManyNamesIsToldApartAtMostOneTimeInTwenty) {
  for (const Noise& noise :
       {Noise(steady), Noise(drifting), Noise(with_outliers), Noise(of_two_modes)}) {
    EXPECT_LE(percent_told_apart(8, 11, noise), 5);
    EXPECT_LE(percent_told_apart(4, 8, noise), 5);
    EXPECT_LE(percent_told_apart(2, 6, noise), 5);
    EXPECT_LE(percent_told_apart(4, 30, noise), 5);
  }
  // Too few rounds say nothing, whatever they show.
  EXPECT_EQ(percent_told_apart(8, 10, with_outliers), 0);
  EXPECT_GE(percent_told_apart(8, 11, drifting, /*in_order=*/true), 50)
      << "what the order of a round is drawn for";
}

TEST(Speed, ATenthIsFoundWithEnoughRounds) {
  constexpr int kNumTables = 200;
  const auto num_found = [](std::int64_t num_rounds, const Noise& noise) {
    int found = 0;
    for (std::uint64_t table = 0; table < kNumTables; ++table) {
      const Speeds speeds =
          compare_speeds(simulated({44, 44, 40, 44}, num_rounds, noise, table, false));
      const bool is_right = speeds.fastest == 2u && speeds.as_fast.empty();
      EXPECT_FALSE(speeds.faster[0][2] || speeds.faster[1][2] || speeds.faster[3][2]);
      found += is_right ? 1 : 0;
    }
    return found;
  };
  EXPECT_GE(num_found(rounds_needed(4), steady), kNumTables * 95 / 100);
  EXPECT_GE(num_found(24, with_outliers), kNumTables * 9 / 10);
}

}  // namespace
}  // namespace tessera::tools
