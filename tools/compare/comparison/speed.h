// Which configurations one can call faster than others, from how fast each was in every round.
//
// [Note: what is told apart] The steps of one training share the minute and the memory pages they
// ran in, so their spread does not say how much another training of the same program would differ.
// The unit is a round: each configuration once, in an order drawn for every round. If two
// configurations are equally fast, chance alone decides which of both meets the better moment of
// each round: the sign of their difference is a fair coin, whatever the noise is (drift, outliers,
// two modes). So a median difference is tested by its signs and needs no assumption about the
// noise; the interval of the test is between two of the sorted ratios. K configurations make
// K (K - 1) / 2 pairs, each of which may err in 1/20 divided by that many cases (Bonferroni): over
// the whole table equal programs are told apart in at most 1 of 20 comparisons. With too few rounds
// even signs that all agree are not rare enough: two configurations need 6 rounds, four 8, eight
// 11. A t-test would do with fewer, and be wrong more often where trainings have two modes. The
// first round may be in any fixed order: the others must agree with it, whatever it shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tessera::tools {

/// The median of a ratio over rounds, and where it lies.
struct RatioInterval {
  double middle = 1, low = 1, high = 1;
};

/// The fewest rounds in which some difference can be told among so many configurations.
std::int64_t rounds_needed(std::size_t num_configurations);

/// Of a / b, values of the same rounds, all positive, of two among `num_configurations`. None: too
/// few rounds to say.
std::optional<RatioInterval> ratio_interval(std::span<const double> a, std::span<const double> b,
                                            std::size_t num_configurations);

/// In which order a round, from 1, trains them: the first as they were asked for, later ones drawn
/// by a fixed seed.
std::vector<std::size_t> order_of_round(std::int64_t round, std::size_t num_configurations);

/// What all configurations together say.
struct Speeds {
  std::int64_t num_rounds = 0;              ///< that all of them have
  std::int64_t rounds_needed = 0;           ///< 0: fewer than two have a speed
  std::optional<std::size_t> fastest = {};  ///< the largest median; none: too few rounds to say
  std::vector<std::size_t> as_fast = {};    ///< others that may be as fast, the likeliest first
  /// Of each, how many times as fast the fastest is; none of itself.
  std::vector<std::optional<RatioInterval>> fastest_ratio = {};
  /// faster[a][b]: a is told faster than b.
  std::vector<std::vector<bool>> faster = {};
};

/// `speeds`: of each configuration, by round; empty: not known.
Speeds compare_speeds(const std::vector<std::vector<double>>& speeds);

}  // namespace tessera::tools
