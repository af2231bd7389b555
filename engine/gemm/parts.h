// f32 matrices as parts of bf16, in the order of tiles: see [Note: three parts of an f32]. Private
// to engine/gemm/split.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::engine {

/// A matrix from some element on, as it is stored.
struct StoredMatrix {
  const float* data;
  std::int64_t ld;
  bool transposed;

  const float* address(std::int64_t row, std::int64_t col) const {
    return data + (transposed ? col * ld + row : row * ld + col);
  }
  StoredMatrix from(std::int64_t row, std::int64_t col) const {
    return {address(row, col), ld, transposed};
  }
};

/// 32 x 32 elements are packed together, as three parts of two tiles each; 32 columns of A or rows
/// of B, 16 apart in a word.
inline constexpr std::int64_t kPackSide = 32, kTileNbytes = 1024, kPartNbytes = 2 * kTileNbytes,
                              kPackNbytes = 3 * kPartNbytes;

/// The first `rows` (at most 32) x `depth` elements of A, 32 columns at a time; zeros beyond them.
void pack_rows(const StoredMatrix& a, std::int64_t rows, std::int64_t depth, std::byte* dst);
/// The first `depth` x `cols` (at most 32) elements of B, 32 rows at a time.
void pack_cols(const StoredMatrix& b, std::int64_t depth, std::int64_t cols, std::byte* dst);

}  // namespace tessera::engine
