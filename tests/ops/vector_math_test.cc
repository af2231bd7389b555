// Errors of the vector functions against double, and special values.
#include "ops/vector_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "ops/elementwise/functions.h"

namespace tessera::ops {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Largest |f - want| * weight(want) over floats spread over [low, high].
double worst(float low, float high, const std::function<float(float)>& f,
             const std::function<double(double)>& want, bool relative) {
  double error = 0;
  constexpr int kSteps = 500'000;
  for (int i = 0; i <= kSteps; ++i) {
    const float x = low + (high - low) * (static_cast<float>(i) / kSteps);
    const double exact = want(x);
    error = std::max(error, std::abs(f(x) - exact) / (relative ? std::abs(exact) : 1));
  }
  return error;
}

TEST(VectorMath, ExpIsWithinOneUlp) {
  const auto exact = [](double x) { return std::exp(x); };
  EXPECT_LT(worst(-87.3f, 88.7f, exp, exact, true), 1.2e-7);
  EXPECT_LT(worst(-1, 1, exp, exact, true), 1e-7);
  const auto exact2 = [](double x) { return std::exp2(x); };
  EXPECT_LT(worst(-126, 127.49f, exp2, exact2, true), 1.2e-7);
  EXPECT_LT(worst(-1, 1, exp2, exact2, true), 1e-7);
}

TEST(VectorMath, SigmoidIsWithinTwoUlp) {
  EXPECT_LT(worst(
                -80, 80, sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, true),
            2e-7);
}

TEST(VectorMath, TanhIsWithinTwoUlp) {
  const auto exact = [](double x) { return std::tanh(x); };
  EXPECT_LT(worst(-0.7f, 0.7f, tanh, exact, true), 2e-7);
  EXPECT_LT(worst(0.6f, 10, tanh, exact, true), 2e-7);
  EXPECT_LT(worst(1e-30f, 2e-4f, tanh, exact, true), 1e-7);
}

TEST(VectorMath, LogIsWithinOneUlp) {
  const auto exact = [](double x) { return std::log(x); };
  EXPECT_LT(worst(0.5f, 2, log, exact, true), 1.2e-7);
  EXPECT_LT(worst(0.9999f, 1.0001f, log, exact, true), 1.2e-7);
  EXPECT_LT(worst(1e-3f, 1e3f, log, exact, true), 1.2e-7);
  EXPECT_LT(worst(1e-38f, 1e-36f, log, exact, true), 1.2e-7);
  EXPECT_LT(worst(1e30f, 3.4e38f, log, exact, true), 1.2e-7);
  EXPECT_LT(worst(1e-45f, 1e-38f, log, exact, true), 1.2e-7);
}

TEST(VectorMath, SoftplusIsWithinThreeUlp) {
  const auto exact = [](double x) { return std::log1p(std::exp(x)); };
  EXPECT_LT(worst(-80, 30, softplus, exact, true), 4e-7);
  EXPECT_LT(worst(-1, 1, softplus, exact, true), 4e-7);
}

TEST(VectorMath, NormalCdfKeepsItsBounds) {
  const auto exact = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  EXPECT_LT(worst(-20, 20, normal_cdf, exact, false), 1e-7);
  EXPECT_LT(worst(-7, 0, normal_cdf, exact, true), 2e-4);
  EXPECT_LT(worst(
                -9, 9, normal_density,
                [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }, true),
            5e-6);
}

TEST(VectorMath, SpecialValues) {
  EXPECT_EQ(exp(0.0f), 1);
  EXPECT_EQ(exp(-0.0f), 1);
  EXPECT_EQ(exp(-kInfinity), 0);
  EXPECT_EQ(exp(-1e30f), 0);
  EXPECT_EQ(exp(-87.34f), 0);
  EXPECT_GT(exp(-87.33f), 0);
  EXPECT_EQ(exp(kInfinity), kInfinity);
  EXPECT_EQ(exp2(0.0f), 1);
  EXPECT_EQ(exp2(-kInfinity), 0);
  EXPECT_EQ(exp2(-1e30f), 0);
  EXPECT_EQ(exp2(-126.51f), 0);
  EXPECT_EQ(exp2(-126.0f), 0x1p-126f);
  EXPECT_EQ(exp2(127.0f), 0x1p127f);
  EXPECT_EQ(exp(1e30f), kInfinity);
  EXPECT_EQ(exp(88.73f), kInfinity);
  EXPECT_NEAR(exp(88.72283f) / std::exp(88.72283172607422), 1, 1e-6);
  EXPECT_EQ(sigmoid(-kInfinity), 0);
  EXPECT_EQ(sigmoid(kInfinity), 1);
  EXPECT_EQ(sigmoid(0), 0.5f);
  EXPECT_EQ(tanh(-kInfinity), -1);
  EXPECT_EQ(tanh(kInfinity), 1);
  EXPECT_TRUE(std::signbit(tanh(-0.0f)));
  EXPECT_EQ(tanh(-1e-40f), -1e-40f);
  EXPECT_EQ(log(1.0f), 0);
  EXPECT_EQ(log(kInfinity), kInfinity);
  EXPECT_EQ(log(0.0f), -kInfinity);
  EXPECT_EQ(log(-0.0f), -kInfinity);
  EXPECT_TRUE(std::isnan(log(-1e-40f)));
  EXPECT_TRUE(std::isnan(log(-kInfinity)));
  EXPECT_EQ(softplus(-kInfinity), 0);
  EXPECT_EQ(softplus(kInfinity), kInfinity);
  EXPECT_EQ(normal_cdf(-kInfinity), 0);
  EXPECT_EQ(normal_cdf(kInfinity), 1);
  EXPECT_EQ(normal_cdf(0), 0.5f);
  EXPECT_EQ(normal_density(kInfinity), 0);
  for (const auto& f : {exp, exp2, sigmoid, tanh, log, softplus, normal_cdf, normal_density})
    EXPECT_TRUE(std::isnan(f(kNan)));
}

TEST(VectorMath, ALoopGivesTheBitsOfSingleCalls) {
  std::vector<float> x(1037), y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 100 * std::sin(static_cast<float>(i));
  for (const std::size_t begin : {0, 1, 5}) {
    for (std::size_t i = begin; i < x.size(); ++i) y[i] = exp(x[i]) + normal_cdf(x[i]);
    for (std::size_t i = begin; i < x.size(); ++i) {
      volatile float single = x[i];
      ASSERT_EQ(y[i], exp(single) + normal_cdf(single)) << i;
    }
  }
}

}  // namespace
}  // namespace tessera::ops
