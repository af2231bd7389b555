#include "shard/norm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "engine/error.h"
#include "engine/isa.h"

namespace tessera::shard {

// [Note: exact bins]
// The square p of an f32 is exact in double. With p < 2^t and at most 2^n terms, adding and
// subtracting s = 1.5 * 2^(t+n) cuts p at multiples of 2^(t-w), w = 52 - n: the part above is such
// a multiple, so is every partial sum of such parts, and being at most 2^(t+n) all of them are
// exact doubles. Exact additions commute. What was cut off is at most half of 2^(t-w) and goes to
// the next bin in the same way, with t - w for t. Where bins begin is a grid, t a multiple of w, so
// that parts of a sum agree without having met. A part starts at the first window that holds its
// largest square with a bit to spare: of higher windows its squares are less than half a unit, so
// they would leave nothing there. Sums are added at the higher of two windows, and the lowest bins
// of the other fall off, as they would have done had it started there. Three bins keep at least 2 w
// bits below the largest square: with up to 2^25 elements what is dropped is below 2^-28 of it in
// total. More elements make bins narrower: up to 2^32 four do as well, and with 2^36 five keep 60
// bits, and what is dropped is below 2^-23 of the largest square.

SquareSum::SquareSum(std::int64_t numel)
    : count_bits_(std::bit_width(static_cast<std::uint64_t>(numel))),
      width_(52 - count_bits_),
      num_bins_(3 + (count_bits_ > 25 ? 1 : 0) + (count_bits_ > 32 ? 1 : 0)),
      window_(0) {
  engine::require(numel < kMaxNormNumel, "[norm] expected fewer than {} elements, got {}",
                  kMaxNormNumel, numel);
}

void SquareSum::raise(int window) {
  if (is_empty_) window_ = window;
  is_empty_ = false;
  for (; window_ < window; ++window_) {
    std::shift_right(bins_.begin(), bins_.begin() + num_bins_, 1);
    bins_[0] = 0;
  }
}

bool SquareSum::try_add(std::span<const float> x) {
  constexpr std::size_t kChunk = 8192;  // read twice, the second time from cache
  for (std::size_t begin = 0; begin < x.size(); begin += kChunk) {
    const std::span<const float> chunk = x.subspan(begin, std::min(kChunk, x.size() - begin));
    const float largest = engine::with_isa([&] { return max_abs(chunk); });
    if (!std::isfinite(largest)) return false;
    if (largest == 0) continue;
    const int exponent = std::ilogb(double{largest} * largest) + 2;  // squares are below half of it
    const int window = (exponent + 4096 * width_ + width_ - 1) / width_ - 4096;
    if (is_empty_ || window > window_) raise(window);
    engine::with_isa([&] {
      if (num_bins_ == 3) add_chunk<3>(chunk);
      if (num_bins_ == 4) add_chunk<4>(chunk);
      if (num_bins_ == 5) add_chunk<5>(chunk);
    });
  }
  return true;
}

template <int kBins>
void SquareSum::add_chunk(std::span<const float> x) {
  const int top = window_ * width_;
  const auto unit = [&](int bin) { return std::ldexp(1.5, top - bin * width_ + count_bits_); };
  const double s0 = unit(0), s1 = unit(1), s2 = unit(2), s3 = unit(3), s4 = unit(4);
  double b0 = 0, b1 = 0, b2 = 0, b3 = 0, b4 = 0;
  const float* data = x.data();
  const auto count = static_cast<std::int64_t>(x.size());
#pragma omp simd reduction(+ : b0, b1, b2, b3, b4)
  for (std::int64_t i = 0; i < count; ++i) {
    const double p = double{data[i]} * data[i];
    const double q0 = (s0 + p) - s0;
    const double r0 = p - q0;
    const double q1 = (s1 + r0) - s1;
    const double r1 = r0 - q1;
    const double q2 = (s2 + r1) - s2;
    b0 += q0;
    b1 += q1;
    b2 += q2;
    if constexpr (kBins > 3) {
      const double r2 = r1 - q2;
      const double q3 = (s3 + r2) - s3;
      b3 += q3;
      if constexpr (kBins > 4) b4 += (s4 + (r2 - q3)) - s4;
    }
  }
  const std::array<double, kMaxBins> sums = {b0, b1, b2, b3, b4};
  for (std::size_t i = 0; i < sums.size(); ++i) bins_[i] += sums[i];
}

void SquareSum::add(const SquareSum& other) {
  if (other.is_empty_) return;
  raise(other.window_);
  const auto shift = static_cast<std::size_t>(window_ - other.window_);
  for (std::size_t i = shift; i < std::size_t(num_bins_); ++i) {
    bins_[i] += other.bins_[i - shift];
  }
}

double SquareSum::total() const { return (bins_[0] + bins_[1]) + (bins_[2] + bins_[3]) + bins_[4]; }

std::array<std::int64_t, SquareSum::kNumWords> SquareSum::words() const {
  constexpr std::int64_t kEmpty = std::numeric_limits<std::int64_t>::min();
  std::array<std::int64_t, kNumWords> words{is_empty_ ? kEmpty : window_};
  for (std::size_t i = 0; i < bins_.size(); ++i)
    words[i + 1] = std::bit_cast<std::int64_t>(bins_[i]);
  return words;
}

SquareSum SquareSum::from_words(std::span<const std::int64_t> words, std::int64_t numel) {
  SquareSum sum(numel);
  sum.is_empty_ = words[0] == std::numeric_limits<std::int64_t>::min();
  if (sum.is_empty_) return sum;
  sum.window_ = static_cast<int>(words[0]);
  for (std::size_t i = 0; i < sum.bins_.size(); ++i) {
    sum.bins_[i] = std::bit_cast<double>(words[i + 1]);
  }
  return sum;
}

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

}  // namespace tessera::shard
