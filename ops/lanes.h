// Sums and maxima of rows on the CPU, in an order that is a function of their length alone, so that
// bits depend on neither place nor instruction set. Private to ops.
#pragma once

#include <cstdint>
#include <cstring>

namespace tessera::ops {

/// Numbers that row reductions keep side by side.
inline constexpr std::int64_t kLanes = 32;

/// `count`, rounded up to whole lanes.
constexpr std::int64_t to_lanes(std::int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

/// The lanes as one, by a tree: the upper half onto the lower, until one is left. combine(a, b)
/// takes b into a. In vectors, as the compiler makes single operations of loops so short; by
/// reference, as functions that take or return vectors differ between instruction sets.
template <class Combine>
float fold_lanes(const float* lanes, Combine combine) {
  using Sixteen [[gnu::vector_size(64)]] = float;
  using Eight [[gnu::vector_size(32)]] = float;
  using Four [[gnu::vector_size(16)]] = float;
  static_assert(kLanes == 32);
  Sixteen a, b;
  std::memcpy(&a, lanes, sizeof(a));
  std::memcpy(&b, lanes + 16, sizeof(b));
  combine(a, b);
  Eight c = __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7);
  combine(c, __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15));
  Four d = __builtin_shufflevector(c, c, 0, 1, 2, 3);
  combine(d, __builtin_shufflevector(c, c, 4, 5, 6, 7));
  float low = d[0], high = d[1];
  combine(low, d[2]);
  combine(high, d[3]);
  combine(low, high);
  return low;
}

/// term(0) + ... + term(numel - 1): the lanes in turn, then a tree. `term` is inlined and
/// vectorised.
template <class Term>
float lane_sum(std::int64_t numel, Term term) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  }
  for (std::int64_t l = 0; i + l < numel; ++l) lanes[l] += term(i + l);
  return fold_lanes(lanes, [](auto& a, const auto& b) { a += b; });
}

}  // namespace tessera::ops
