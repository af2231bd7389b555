// 16 x 16 words in registers, transposed. Private to engine/gemm.
#pragma once

#include <utility>

namespace tessera::engine {

inline constexpr int kTransposeSide = 16;

namespace internal {

// Where a row's index and a column's differ in this bit, elements change places.
template <int kBit, class V, int... kLane>
[[gnu::always_inline]] inline void exchange(V (&rows)[kTransposeSide],
                                            std::integer_sequence<int, kLane...>) {
  for (int i = 0; i < kTransposeSide; ++i) {
    if ((i & kBit) != 0) continue;
    const V x = rows[i], y = rows[i + kBit];
    rows[i] = __builtin_shufflevector(x, y, ((kLane & kBit) != 0 ? kLane - kBit + 16 : kLane)...);
    rows[i + kBit] =
        __builtin_shufflevector(x, y, ((kLane & kBit) != 0 ? kLane + 16 : kLane + kBit)...);
  }
}

}  // namespace internal

/// V: vectors of 16 elements of 4 bytes. For callers inside with_isa().
template <class V>
[[gnu::always_inline]] inline void transpose(V (&rows)[kTransposeSide]) {
  constexpr std::make_integer_sequence<int, kTransposeSide> kAll;
  internal::exchange<8>(rows, kAll);
  internal::exchange<4>(rows, kAll);
  internal::exchange<2>(rows, kAll);
  internal::exchange<1>(rows, kAll);
}

}  // namespace tessera::engine
