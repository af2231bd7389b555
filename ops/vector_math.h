// Functions of f32 that compilers vectorise: no branches, no tables, no calls. Private to ops.
// Every operation is spelled out (std::fma where two are one), so an element's bits do not depend
// on its place in the loop. NaN gives NaN. tests/ops/vector_math_test.cc holds the errors stated
// here. CUDA kernels call the same functions; there exp and the division of sigmoid are the GPU's
// approximations, with the errors stated in the CUDA programming guide: 2 + 1.2 |x| ulp and 2 ulp.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera::ops {

/// condition ? a : b with both evaluated. Compilers turn `?:` into branches when one side is a
/// calculation or when it is nested, and then do not vectorise.
constexpr float select(bool condition, float a, float b) {
  const std::uint32_t mask = -static_cast<std::uint32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a) & mask) |
                              (std::bit_cast<std::uint32_t>(b) & ~mask));
}

/// Operations that the functions below count as in Work::flops.
inline constexpr double kExpFlops = 19, kSigmoidFlops = kExpFlops + 2,
                        kNormalCdfFlops = kExpFlops + 21;

/// e^x within 1 ulp; 0 where the result is below 2^-126, infinity where it is above the largest
/// float. x = n ln 2 + r and |r| <= ln(2)/2: minimax polynomial for e^r, n goes into the exponent.
constexpr float exp(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  constexpr float kLog2E = 0x1.715476p+0f, kLn2High = 0x1.62e400p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  constexpr float kLargest = 0x1.62e42ep+6f, kSmallest = -0x1.5d589ep+6f;
  const float shifted = std::fma(x, kLog2E, kRound);
  const float n = shifted - kRound;
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, x));
  float p = 0.00138145986f;
  p = std::fma(p, r, 0.00836871688f);
  p = std::fma(p, r, 0.041668388f);
  p = std::fma(p, r, 0.166665206f);
  p = std::fma(p, r, 0.499999934f);
  p = std::fma(p * r, r, r) + 1.0f;
  // Shifting drops the bits of kRound.
  const auto y = std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) +
                                      (std::bit_cast<std::uint32_t>(shifted) << 23));
  const float in_range = select(x < kSmallest, 0.0f, y);
  return select(x <= kLargest, in_range, select(x != x, x, std::numeric_limits<float>::infinity()));
#endif
}

/// 2^x within 1 ulp for x < 127.5, in fewer operations than exp(). What is below 2^-126 may be 0.
/// x = n + r and |r| <= 1/2: minimax polynomial for 2^r, times 2^n.
constexpr float exp2(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  constexpr float kSmallest = -127;
  x = kSmallest > x ? kSmallest : x;  // as it is written, NaN stays NaN
  const float shifted = x + kRound;
  const float r = x - (shifted - kRound);
  float p = 0x1.41d334p-13f;
  p = std::fma(p, r, 0x1.5f456ap-10f);
  p = std::fma(p, r, 0x1.3b2dbcp-7f);
  p = std::fma(p, r, 0x1.c6aed4p-5f);
  p = std::fma(p, r, 0x1.ebfbdap-3f);
  p = std::fma(p, r, 0x1.62e43p-1f);
  p = std::fma(p, r, 1.0f);
  // Shifting drops the bits of kRound; the exponent of -127 is that of 0.
  return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127u) << 23);
}

/// 1 / (1 + e^-x) within 2 ulp.
constexpr float sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, 1.0f + exp(-x));
#else
  return 1.0f / (1.0f + exp(-x));
#endif
}

/// Gaussian distribution function P(X <= x) = (1 + erf(x / sqrt 2)) / 2, absolute error below
/// 1e-7, and below 2e-4 of the result for x > -7. For x < 0 it is e^(x g(-x)) / 2 with g a minimax
/// polynomial for log(2 P) / x; P(X <= x) + P(X <= -x) = 1 gives the rest.
constexpr float normal_cdf(float x) {
  const float t = std::fabs(x);
  float g = 8.2355721e-09f;
  g = std::fma(g, t, -2.92276219e-07f);
  g = std::fma(g, t, 4.36139305e-06f);
  g = std::fma(g, t, -3.43919391e-05f);
  g = std::fma(g, t, 0.000131746045f);
  g = std::fma(g, t, 0.000122319761f);
  g = std::fma(g, t, -0.00495363637f);
  g = std::fma(g, t, 0.0364334244f);
  g = std::fma(g, t, 0.318284043f);
  g = std::fma(g, t, 0.797886783f);
  const float tail = 0.5f * exp(-t * g);
  // tail for x < 0, 1 - tail otherwise.
  return select(x >= 0, 1.0f, 0.0f) + std::copysign(tail, -x);
}

/// Gaussian density e^(-x^2 / 2) / sqrt(2 pi).
constexpr float normal_density(float x) { return 0.398942280f * exp(-0.5f * x * x); }

}  // namespace tessera::ops
