#include "shard/norm.h"

#include <bit>
#include <cmath>
#include <limits>

#include "engine/error.h"

namespace tessera::shard {

// [Note: exact bins]
// The square p of an f32 is exact in double. With p < 2^e and at most 2^n terms, adding and
// subtracting s = 1.5 * 2^(e+n) cuts p at multiples of 2^(e+n-52): the part above is such a
// multiple, so is every partial sum of such parts, and being at most 2^(e+n) all of them are exact
// doubles. Exact additions commute. What was cut off is below 2^(e+n-52) and goes to the next bin
// in the same way. Three bins keep 3 * (52 - n) bits below the largest square: with 2^31 elements
// what is dropped is below 2^-32 of the largest square in total.

void SquareBins::add(const SquareBins& other) {
  for (std::size_t i = 0; i < bins.size(); ++i) bins[i] += other.bins[i];
}

double SquareBins::total() const { return bins[0] + (bins[1] + bins[2]); }

float max_abs(std::span<const float> x) {
  // As integers: NaN and infinity are the largest, and the order of f32 is that of its bits.
  std::uint32_t bits = 0;
  const float* data = x.data();
  const auto numel = static_cast<std::int64_t>(x.size());
#pragma omp simd reduction(max : bits)
  for (std::int64_t i = 0; i < numel; ++i) {
    const std::uint32_t b = std::bit_cast<std::uint32_t>(data[i]) & 0x7FFFFFFFu;
    bits = b > bits ? b : bits;
  }
  return bits >= 0x7F800000u ? std::numeric_limits<float>::infinity() : std::bit_cast<float>(bits);
}

void add_squares(SquareBins& sum, std::span<const float> x, float max_abs, std::int64_t numel) {
  engine::require(numel < (std::int64_t{1} << 32),
                  "[norm] expected fewer than 2^32 elements, got {}", numel);
  if (max_abs == 0) return;
  const int n = std::bit_width(static_cast<std::uint64_t>(numel));  // numel < 2^n
  const int e = std::ilogb(double{max_abs} * max_abs) + 1;          // squares are below 2^e
  const double s0 = std::ldexp(1.5, e + n), s1 = std::ldexp(1.5, e + n - 52 + n),
               s2 = std::ldexp(1.5, e + n - 2 * (52 - n));
  double b0 = 0, b1 = 0, b2 = 0;
  const float* data = x.data();
  const auto count = static_cast<std::int64_t>(x.size());
#pragma omp simd reduction(+ : b0, b1, b2)
  for (std::int64_t i = 0; i < count; ++i) {
    const double p = double{data[i]} * data[i];
    const double q0 = (s0 + p) - s0;
    const double r0 = p - q0;
    const double q1 = (s1 + r0) - s1;
    const double q2 = (s2 + (r0 - q1)) - s2;
    b0 += q0;
    b1 += q1;
    b2 += q2;
  }
  sum.add({{b0, b1, b2}});
}

}  // namespace tessera::shard
