// A sum of squares that does not depend on order or split: the same bits for every sharding.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace tessera::shard {

/// A sum may have fewer elements than this.
inline constexpr std::int64_t kMaxNormNumel = std::int64_t{1} << 37;

/// Partial sums that add without rounding, whatever the order (Demmel & Nguyen, "Fast Reproducible
/// Floating-Point Summation", ARITH 2013; see [Note: exact bins] in norm.cc).
class SquareSum {
 public:
  /// `numel`: elements of the whole sum, equal in all its parts. Throws InvalidArgument from
  /// kMaxNormNumel on.
  explicit SquareSum(std::int64_t numel);

  /// Adds the squares of `x`, or returns false and means nothing any more if one is not finite.
  bool try_add(std::span<const float> x);
  void add(const SquareSum& other);
  double total() const;

  /// As numbers that ranks exchange, and back.
  static constexpr int kNumWords = 6;
  std::array<std::int64_t, kNumWords> words() const;
  static SquareSum from_words(std::span<const std::int64_t> words, std::int64_t numel);

 private:
  static constexpr int kMaxBins = 5;
  void raise(int window);
  template <int kBins>
  void add_chunk(std::span<const float> x);

  int count_bits_;        // numel < 2^count_bits_
  int width_;             // bits of a bin
  int num_bins_;          // the rest stay 0
  int window_;            // of bins_[0]
  bool is_empty_ = true;  // then window_ means nothing
  std::array<double, kMaxBins> bins_{};
};

/// Largest |x|. NaN and infinity give infinity.
float max_abs(std::span<const float> x);

}  // namespace tessera::shard
