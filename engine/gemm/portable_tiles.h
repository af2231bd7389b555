// What the tiles of AMX do, on any CPU: so that all around them can be tested there. Slow.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace tessera::engine {

/// Eight tiles, each 16 rows of 64 bytes.
class PortableTiles {
 public:
  template <int kTile>
  void zero() {
    tiles_[kTile] = {};
  }
  /// Rows are `stride` bytes apart.
  template <int kTile>
  void load(const void* src, std::int64_t stride) {
    for (std::int64_t i = 0; i < 16; ++i)
      std::memcpy(tiles_[kTile][i].data(), static_cast<const char*>(src) + i * stride, 64);
  }
  template <int kTile>
  void store(void* dst, std::int64_t stride) {
    for (std::int64_t i = 0; i < 16; ++i)
      std::memcpy(static_cast<char*>(dst) + i * stride, tiles_[kTile][i].data(), 64);
  }
  /// C (16, 16) f32 += A (16, 32) B (32, 16) of bf16, two in a word: along a row of A, along a
  /// column of B.
  template <int kC, int kA, int kB>
  void add_product() {
    add_product(tiles_[kC], tiles_[kA], tiles_[kB]);
  }

 private:
  using Tile = std::array<std::array<std::uint32_t, 16>, 16>;

  static void add_product(Tile& c, const Tile& a, const Tile& b);

  alignas(64) std::array<Tile, 8> tiles_{};
};

}  // namespace tessera::engine
