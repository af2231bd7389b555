// Transposes: 16 x 16 words in registers, and f32 in memory by such blocks. Private to engine/gemm
// and to attention.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
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

/// dst[i * dst_ld + r] = src[r * src_ld + i] of `rows` x `cols`. For callers inside with_isa().
[[gnu::always_inline]] inline void transpose(float* dst, std::int64_t dst_ld, const float* src,
                                             std::int64_t rows, std::int64_t cols,
                                             std::int64_t src_ld) {
  using Floats [[gnu::vector_size(64)]] = float;
  constexpr std::int64_t kSide = kTransposeSide;
  for (std::int64_t r = 0; r < rows; r += kSide, src += kSide * src_ld, dst += kSide) {
    const std::int64_t num_rows = std::min(kSide, rows - r);
    const std::int64_t in_blocks = num_rows == kSide ? cols / kSide * kSide : 0;
    for (std::int64_t i = 0; i < in_blocks; i += kSide) {
      Floats block[kSide];
      for (std::int64_t j = 0; j < kSide; ++j)
        std::memcpy(&block[j], src + j * src_ld + i, sizeof(Floats));
      transpose(block);
      for (std::int64_t j = 0; j < kSide; ++j)
        std::memcpy(dst + (i + j) * dst_ld, &block[j], sizeof(Floats));
    }
    for (std::int64_t i = in_blocks; i < cols; ++i)
      for (std::int64_t j = 0; j < num_rows; ++j) dst[i * dst_ld + j] = src[j * src_ld + i];
  }
}

}  // namespace tessera::engine
