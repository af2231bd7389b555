// Normal numbers from uniform ones (Box and Muller 1958), with the same bits on every machine: made
// of additions, multiplications, divisions and square roots alone, which IEEE 754 rounds alike
// everywhere. Logarithms and sines of C libraries and GPUs differ in their last bits. For code that
// is built as the engine is, without contracting a * b + c.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace tessera::engine {

/// ln x within 1e-15 (relative, absolute below 1), for a positive x that is not denormal.
/// x = 2^e m with m around 1, ln m = 2 artanh((m - 1) / (m + 1)) by its series: |s| < 0.172, so
/// that the first term left out is below 2^-57.
constexpr double portable_log(double x) {
  constexpr auto kSqrtHalf = std::bit_cast<std::int64_t>(0x1.6a09e667f3bcdp-1);
  const auto bits = std::bit_cast<std::int64_t>(x);
  const std::int64_t exponent = (bits - kSqrtHalf) >> 52;
  const double m = std::bit_cast<double>(bits - exponent * (std::int64_t{1} << 52));
  const double s = (m - 1) / (m + 1), z = s * s;
  constexpr double kTerms[] = {1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                               1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3};
  double series = 1.0 / 21;
  for (const double term : kTerms) series = series * z + term;
  constexpr double kHigh = 0x1.62e42feep-1, kLow = 0x1.a39ef35793c76p-33;  // ln 2; e kHigh is exact
  const auto e = static_cast<double>(exponent);
  return e * kHigh + (2 * s + (2 * s * z * series + e * kLow));
}

struct CosSin {
  double cos, sin;
};

/// Of 2 pi u, for u in [0, 1) of at most 50 bits, within 1e-15: by eighths of a turn, which are
/// exact, and the series up to pi/4.
constexpr CosSin portable_cos_sin(double u) {
  constexpr double kQuarterPi = 0x1.921fb54442d18p-1;
  const auto eighth = static_cast<int>(8 * u);
  const double rest = 8 * u - eighth;
  const double x = kQuarterPi * (eighth % 2 == 0 ? rest : 1 - rest), z = x * x;
  constexpr auto kTerms = [] {  // 1 / (n (n - 1)) and 1 / (n (n + 1)), n = 18, 16, ..., 2
    std::array<CosSin, 9> terms{};
    for (int i = 0; i < 9; ++i) {
      const int n = 18 - 2 * i;
      terms[static_cast<std::size_t>(i)] = {1.0 / (n * (n - 1)), 1.0 / (n * (n + 1))};
    }
    return terms;
  }();
  double cos = 1, sin = 1;
  for (const CosSin& term : kTerms) {
    cos = 1 - cos * z * term.cos;
    sin = 1 - sin * z * term.sin;
  }
  sin *= x;
  if ((eighth + 1) % 4 >= 2) {
    const double other = sin;
    sin = cos;
    cos = other;
  }
  return {(eighth + 2) % 8 >= 4 ? -cos : cos, eighth >= 4 ? -sin : sin};
}

/// Two independent standard normal numbers from two uniform ones in (0, 1), of at most 50 bits.
constexpr CosSin box_muller(double u1, double u2) {
  const double radius = std::sqrt(-2.0 * portable_log(u1));
  const CosSin direction = portable_cos_sin(u2);
  return {radius * direction.cos, radius * direction.sin};
}

}  // namespace tessera::engine
