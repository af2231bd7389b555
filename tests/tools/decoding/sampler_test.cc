// What is drawn, by counts, and what is never drawn.
#include "tools/decoding/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using Logits = std::vector<float>;
using Tokens = std::set<std::int32_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kDraws = 20'000;

// Logits of these probabilities, or of a multiple of them.
Logits logs(const std::vector<double>& probabilities) {
  Logits logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

std::map<std::int32_t, int> counts(const Logits& logits, const Sampling& sampling) {
  Sampler sampler(sampling, 0);
  std::map<std::int32_t, int> counts;
  for (std::int64_t place = 0; place < kDraws; ++place) ++counts[sampler.next(logits, place)];
  return counts;
}

Tokens drawn(const Logits& logits, const Sampling& sampling) {
  Tokens tokens;
  for (const auto& [token, count] : counts(logits, sampling)) tokens.insert(token);
  return tokens;
}

// Four standard deviations.
void expect_distribution(const Logits& logits, const Sampling& sampling,
                         const std::vector<double>& want) {
  std::map<std::int32_t, int> got = counts(logits, sampling);
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double tolerance = 4 * std::sqrt(kDraws * want[i] * (1 - want[i]));
    EXPECT_NEAR(got[static_cast<std::int32_t>(i)], kDraws * want[i], tolerance) << i;
  }
}

TEST(Sampler, TakesTheFirstOfTheLikeliestWithoutTemperature) {
  Sampler sampler({}, 0);
  EXPECT_EQ(sampler.next(Logits{1, 3, 2, 3}, 0), 1);
  EXPECT_EQ(sampler.next(Logits{-5}, 0), 0);
  EXPECT_EQ(sampler.next(Logits{-kInfinity, -7, -kInfinity}, 0), 1);
}

TEST(Sampler, RefusesWhatIsNoNumber) {
  for (const double temperature : {0.0, 1.0}) {
    Sampler sampler({.temperature = temperature}, 0);
    const auto refusal = [&](const Logits& logits) {
      return error_of<InvalidArgument>([&] { sampler.next(logits, 0); });
    };
    EXPECT_TRUE(has(refusal({NAN, 1}), {"[generate]", "got NaN"}));
    EXPECT_TRUE(has(refusal({1, NAN}), {"got NaN"}));
    EXPECT_TRUE(has(refusal({1, kInfinity}), {"got an infinite one"}));
    EXPECT_TRUE(has(refusal({-kInfinity, -kInfinity}), {"got an infinite one"}));
  }
}

TEST(Sampler, DrawsByProbability) {
  const std::vector<double> p = {0.1, 0.4, 0.3, 0.2};
  expect_distribution(logs(p), {.temperature = 1}, p);
  expect_distribution(logs({1, 4, 3, 2}), {.temperature = 1}, p);
}

TEST(Sampler, TemperatureIsAPowerOfProbabilities) {
  expect_distribution(logs({1, 3, 2}), {.temperature = 0.5}, {1 / 14., 9 / 14., 4 / 14.});
  expect_distribution(logs({16, 1, 9}), {.temperature = 2}, {4 / 8., 1 / 8., 3 / 8.});
  EXPECT_EQ(drawn({0, 1, 2}, {.temperature = 1e-300}), Tokens{2});
  expect_distribution({0, 50, 100}, {.temperature = 1e6}, {1 / 3., 1 / 3., 1 / 3.});
}

TEST(Sampler, TopKLeavesTheLikeliestWithTheirProportions) {
  const Logits logits = logs({1, 4, 2, 3});
  EXPECT_EQ(drawn(logits, {.temperature = 1, .top_k = 1}), Tokens{1});
  expect_distribution(logits, {.temperature = 1, .top_k = 2}, {0, 4 / 7., 0, 3 / 7.});
  expect_distribution(logits, {.temperature = 1, .top_k = 3}, {0, 4 / 9., 2 / 9., 3 / 9.});
  for (const std::int64_t all : {0, 4, 5}) {
    expect_distribution(logits, {.temperature = 1, .top_k = all}, {.1, .4, .2, .3});
  }
}

TEST(Sampler, TopPLeavesAsFewAsHaveTheProbability) {
  const Logits logits = logs({2, 1, 4, 1});
  const auto left = [&](double p) { return drawn(logits, {.temperature = 1, .top_p = p}); };
  EXPECT_EQ(left(1e-9), Tokens{2});
  EXPECT_EQ(left(0.49), Tokens{2});
  EXPECT_EQ(left(0.51), (Tokens{0, 2}));
  EXPECT_EQ(left(0.74), (Tokens{0, 2}));
  EXPECT_EQ(left(0.76), (Tokens{0, 1, 2})) << "the first of equals";
  EXPECT_EQ(left(0.88), (Tokens{0, 1, 2, 3}));
  expect_distribution(logits, {.temperature = 1, .top_p = 0.6}, {2 / 6., 0, 4 / 6., 0});
  expect_distribution(logits, {.temperature = 1}, {2 / 8., 1 / 8., 4 / 8., 1 / 8.});
}

TEST(Sampler, TheFirstOfEqualsAreTheLikelier) {
  const Logits alike(8, 0.25f);
  EXPECT_EQ(drawn(alike, {.temperature = 1, .top_k = 3}), (Tokens{0, 1, 2}));
  EXPECT_EQ(drawn(alike, {.temperature = 1, .top_p = 0.25}), (Tokens{0, 1}));
  EXPECT_EQ(drawn(alike, {.temperature = 1, .top_p = 0.26}), (Tokens{0, 1, 2}));
}

TEST(Sampler, TopPIsOfWhatTopKLeaves) {
  const Logits logits = logs({4, 2, 1, 1});  // of two, 2/3 and 1/3
  EXPECT_EQ(drawn(logits, {.temperature = 1, .top_k = 2, .top_p = 0.66}), Tokens{0});
  EXPECT_EQ(drawn(logits, {.temperature = 1, .top_k = 2, .top_p = 0.67}), (Tokens{0, 1}));
}

// After temperature, too.
TEST(Sampler, TopPIsOfTheProbabilitiesThatAreDrawn) {
  const Logits logits = logs({9, 4, 1});  // at 2: 3/6, 2/6, 1/6
  EXPECT_EQ(drawn(logits, {.temperature = 2, .top_p = 0.51}), (Tokens{0, 1}));
  EXPECT_EQ(drawn(logits, {.temperature = 2, .top_p = 0.84}), (Tokens{0, 1, 2}));
}

TEST(Sampler, WhatHasNoProbabilityIsNotDrawn) {
  const Logits logits = {-kInfinity, 0, -kInfinity, 0, -kInfinity};
  for (const double p : {0.999, 1.0}) {
    for (const std::int64_t k : {0, 4}) {
      const Tokens tokens = drawn(logits, {.temperature = 1, .top_k = k, .top_p = p});
      EXPECT_EQ(tokens, (Tokens{1, 3})) << k << " " << p;
    }
  }
}

TEST(Sampler, DependsOnSeedPromptAndPlaceAlone) {
  const Logits logits(1000, 0);
  const auto draw = [&](std::uint64_t seed, std::uint64_t prompt, std::int64_t first) {
    Sampler sampler({.temperature = 1, .seed = seed}, prompt);
    std::vector<std::int32_t> tokens;
    for (std::int64_t i = 0; i < 10; ++i) tokens.push_back(sampler.next(logits, first + i));
    return tokens;
  };
  const auto base = draw(3, 5, 7);
  EXPECT_EQ(draw(3, 5, 7), base);
  for (const auto& other : {draw(4, 5, 7), draw(3, 6, 7), draw(3, 5, 17)}) EXPECT_NE(other, base);
  // What came before has no part in it.
  const auto later = draw(3, 5, 8);
  EXPECT_EQ(std::vector(later.begin(), later.end() - 1), std::vector(base.begin() + 1, base.end()));
}

}  // namespace
}  // namespace tessera::tools
