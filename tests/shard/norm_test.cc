// The sum of squares has the same bits for every order and split, and is right.
#include "shard/norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace tessera::shard {
namespace {

// The parts never met, and each is under the window of its own largest element.
SquareSum sum_in_parts(std::span<const float> x, std::size_t num_parts) {
  const auto numel = static_cast<std::int64_t>(x.size());
  SquareSum total(numel);
  const std::size_t part = (x.size() + num_parts - 1) / num_parts;
  for (std::size_t begin = 0; begin < x.size(); begin += part) {
    SquareSum sum(numel);
    EXPECT_TRUE(sum.try_add(x.subspan(begin, std::min(part, x.size() - begin))));
    total.add(SquareSum::from_words(sum.words(), numel));
  }
  return total;
}

double sum_of(std::span<const float> x, std::size_t num_parts) {
  return sum_in_parts(x, num_parts).total();
}

TEST(SumOfSquares, SameBitsForEveryOrderAndSplit) {
  std::mt19937 random(1);
  for (const float spread : {0.0f, 5.0f, 30.0f}) {
    std::vector<float> x(10007);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> exponent(-spread, spread);
    for (float& v : x) v = normal(random) * std::exp2(exponent(random));
    const double expected = sum_of(x, 1);
    long double exact = 0;
    for (const float v : x) exact += static_cast<long double>(v) * v;
    EXPECT_NEAR(expected / static_cast<double>(exact), 1, 1e-9);
    for (const std::size_t parts : {2, 3, 7, 100, 10007}) {
      std::shuffle(x.begin(), x.end(), random);
      EXPECT_EQ(sum_of(x, parts), expected) << "parts " << parts << " spread " << spread;
    }
  }
}

TEST(SumOfSquares, PlainSummationWouldDiffer) {  // or the test above proves nothing
  std::mt19937 random(1);
  std::vector<float> x(10007);
  std::normal_distribution<float> normal;
  for (float& v : x) v = normal(random);
  auto plain = [&] {
    return std::accumulate(x.begin(), x.end(), 0.0, [](double s, float v) {
      return s + static_cast<double>(v) * static_cast<double>(v) / 3;
    });
  };
  const double before = plain();
  std::shuffle(x.begin(), x.end(), random);
  EXPECT_NE(plain(), before);
}

TEST(SumOfSquares, ExtremesAreExact) {
  const std::vector<float> tiny(3, std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(sum_of(tiny, 1), 3 * std::pow(double{tiny[0]}, 2));
  const std::vector<float> huge(3, std::numeric_limits<float>::max());
  EXPECT_EQ(sum_of(huge, 2), 3 * std::pow(double{huge[0]}, 2));
  EXPECT_EQ(sum_of(std::vector<float>(5, 0.0f), 1), 0);
  EXPECT_EQ(sum_of({}, 1), 0);
}

// The more terms a sum may have, the narrower and the more are its bins: these squares lie in the
// last of each.
TEST(SumOfSquares, ManySmallSquaresAreNotLostNextToALargeOne) {
  const std::vector<float> large = {1}, small(1 << 20, 0x1p-25f);
  for (const int log2_numel : {21, 24, 25, 31, 32, 36}) {
    const std::int64_t numel = std::int64_t{1} << log2_numel;
    for (const bool large_first : {false, true}) {
      SquareSum total(numel);
      for (const auto& part : {large_first ? large : small, large_first ? small : large}) {
        SquareSum sum(numel);
        EXPECT_TRUE(sum.try_add(part));
        total.add(SquareSum::from_words(sum.words(), numel));
      }
      EXPECT_EQ(total.total(), 1 + 0x1p-30) << log2_numel;
      SquareSum together(numel);
      EXPECT_TRUE(together.try_add(large_first ? large : small));
      EXPECT_TRUE(together.try_add(large_first ? small : large));
      EXPECT_EQ(together.words(), total.words()) << log2_numel;
    }
  }
}

// Just below and at the power of two where the next window begins.
TEST(SumOfSquares, SameBitsForEverySplitWhereWindowsMeet) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> significand(0.5f, 1);
  for (int exponent = -60; exponent <= 60; ++exponent) {
    std::vector<float> x(257);
    for (float& v : x) v = std::ldexp(significand(random), exponent);
    x[17] = std::ldexp(1.0f, exponent);
    x[100] = std::ldexp(std::nextafter(1.0f, 0.0f), exponent);
    const auto expected = sum_in_parts(x, 1).words();
    for (const std::size_t parts : {2, 16, 257}) {
      EXPECT_EQ(sum_in_parts(x, parts).words(), expected) << exponent;
    }
  }
}

// As of a rank whose gradients are all zero, beside ranks with small ones.
TEST(SumOfSquares, APartOfZerosChangesNothing) {
  for (const int exponent : {-100, -60, -20, 0, 60}) {
    const std::vector<float> x(9, std::ldexp(1.5f, exponent));
    const auto numel = std::ssize(x);
    SquareSum zeros(numel), sum(numel);
    EXPECT_TRUE(zeros.try_add(std::vector<float>(9, 0.0f)));
    EXPECT_EQ(zeros.words(), SquareSum(numel).words());
    sum.add(zeros);
    EXPECT_TRUE(sum.try_add(x));
    sum.add(SquareSum::from_words(zeros.words(), numel));
    EXPECT_EQ(sum.words(), sum_in_parts(x, 1).words()) << exponent;
    EXPECT_EQ(sum.total(), 9 * std::ldexp(2.25, 2 * exponent));
  }
}

TEST(SumOfSquares, RefusesWhatIsNotFinite) {
  SquareSum sum(3);
  EXPECT_FALSE(sum.try_add(std::vector<float>{1, std::numeric_limits<float>::infinity(), 2}));
}

TEST(MaxAbs, NonFiniteIsInfinite) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(max_abs(std::vector<float>{1, -3, 2}), 3);
  EXPECT_EQ(max_abs(std::vector<float>{1, std::nanf(""), 2}), inf);
  EXPECT_EQ(max_abs(std::vector<float>{1, -std::nanf(""), 2}), inf);
  EXPECT_EQ(max_abs(std::vector<float>{1, -inf}), inf);
  EXPECT_EQ(max_abs({}), 0);
}

}  // namespace
}  // namespace tessera::shard
