// Compiled without contraction: the rest of a part is exact, and has to be.
#include "engine/gemm/parts.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "engine/gemm/transpose.h"
#include "engine/isa.h"

namespace tessera::engine {
namespace {

using Words [[gnu::vector_size(64)]] = std::uint32_t;
using Floats [[gnu::vector_size(64)]] = float;

constexpr std::int64_t kSide = kPackSide, kLanes = 16;

using Block = std::array<std::array<float, kSide>, kSide>;

// 32 x 32 elements that are stored transposed.
[[gnu::always_inline]] inline void copy_transposed(const StoredMatrix& src, Block& block) {
  for (std::int64_t i = 0; i < kSide; i += kLanes)
    for (std::int64_t j = 0; j < kSide; j += kLanes) {
      Floats rows[kLanes];
      for (int r = 0; r < kLanes; ++r) std::memcpy(&rows[r], src.address(i, j + r), sizeof(Floats));
      transpose(rows);
      for (int r = 0; r < kLanes; ++r) std::memcpy(&block[i + r][j], &rows[r], sizeof(Floats));
    }
}

// The first rows x cols elements of `src`, zeros after them.
[[gnu::always_inline]] inline void copy_some(const StoredMatrix& src, std::int64_t rows,
                                             std::int64_t cols, Block& block) {
  block = {};
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j) block[i][j] = *src.address(i, j);
}

[[gnu::always_inline]] inline void subtract(Floats& v, const Words& bits) {
  Floats part;
  std::memcpy(&part, &bits, sizeof(part));
  v -= part;
}

// The parts of 16 pairs of elements, one part after the other. The first is cut off, so that a
// finite number never has an infinite one; the second is rounded to the nearest; of the third 8
// bits are left. An infinity leaves NaN; NaN, whose first part may look infinite, does so too.
[[gnu::always_inline]] inline void pack_pairs(const float* low_src, const float* high_src,
                                              std::byte* dst) {
  Floats low, high;
  std::memcpy(&low, low_src, sizeof(low));
  std::memcpy(&high, high_src, sizeof(high));
  for (int part = 0; part < 3; ++part, dst += kPartNbytes) {
    Words x, y;
    std::memcpy(&x, &low, sizeof(x));
    std::memcpy(&y, &high, sizeof(y));
    if (part == 1) x += 0x8000u, y += 0x8000u;
    y &= 0xffff0000u;
    const Words pairs = x >> 16 | y;
    std::memcpy(dst, &pairs, sizeof(pairs));
    if (part == 2) break;
    x &= 0xffff0000u;
    subtract(low, x);
    subtract(high, y);
  }
}

// Calls fn(k, data, ld) with each whole block of 32 x 32 elements: as they lie, or copied.
template <class Fn>
[[gnu::always_inline]] inline void for_each_block(const StoredMatrix& src, std::int64_t rows,
                                                  std::int64_t cols, bool along_rows, Fn fn) {
  Block block;
  const std::int64_t length = along_rows ? cols : rows;
  for (std::int64_t k = 0; k < length; k += kSide) {
    const StoredMatrix part = along_rows ? src.from(0, k) : src.from(k, 0);
    const std::int64_t num_rows = along_rows ? rows : std::min(kSide, rows - k);
    const std::int64_t num_cols = along_rows ? std::min(kSide, cols - k) : cols;
    const bool is_whole = num_rows == kSide && num_cols == kSide;
    if (is_whole && !src.transposed) {
      fn(k, part.data, part.ld);
      continue;
    }
    is_whole ? copy_transposed(part, block) : copy_some(part, num_rows, num_cols, block);
    fn(k, block[0].data(), kSide);
  }
}

}  // namespace

void pack_rows(const StoredMatrix& a, std::int64_t rows, std::int64_t depth, std::byte* dst) {
  with_isa([&] {
    for_each_block(a, rows, depth, /*along_rows=*/true,
                   [dst](std::int64_t k, const float* data, std::int64_t ld) {
                     std::byte* const tiles = dst + k / kSide * kPackNbytes;
                     for (std::int64_t i = 0; i < kSide; ++i)
                       pack_pairs(data + i * ld, data + i * ld + kLanes, tiles + i * 64);
                   });
  });
}

void pack_cols(const StoredMatrix& b, std::int64_t depth, std::int64_t cols, std::byte* dst) {
  with_isa([&] {
    for_each_block(b, depth, cols, /*along_rows=*/false,
                   [dst](std::int64_t k, const float* data, std::int64_t ld) {
                     std::byte* const tiles = dst + k / kSide * kPackNbytes;
                     for (std::int64_t i = 0; i < kLanes; ++i)
                       for (std::int64_t t = 0; t < 2; ++t)
                         pack_pairs(data + i * ld + t * kLanes,
                                    data + (i + kLanes) * ld + t * kLanes,
                                    tiles + t * kTileNbytes + i * 64);
                   });
  });
}

}  // namespace tessera::engine
