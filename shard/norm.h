// A sum of squares that does not depend on order or split: the same bits for every sharding.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace tessera::shard {

/// Partial sums that add without rounding, whatever the order (Demmel & Nguyen, "Fast Reproducible
/// Floating-Point Summation", ARITH 2013; see [Note: exact bins] in norm.cc).
struct SquareBins {
  static constexpr int kNumBins = 3;
  std::array<double, kNumBins> bins{};

  void add(const SquareBins& other);
  double total() const;
};

/// Largest |x|. NaN and infinity give infinity.
float max_abs(std::span<const float> x);

/// Adds the squares of `x`. `max_abs` bounds every |x| of the whole sum and `numel` is the number
/// of elements of the whole sum (below 2^32): both must be equal in all partial sums.
void add_squares(SquareBins& sum, std::span<const float> x, float max_abs, std::int64_t numel);

}  // namespace tessera::shard
