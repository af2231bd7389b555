// How kernels walk a shard: by tiles of its segments, so that every block has as much to do.
#pragma once

#include <cstdint>

namespace tessera::shard {

/// A row of Flat::tiles: a run of elements of one parameter.
struct alignas(16) Tile {
  std::int64_t begin;      ///< first element, counted as in Segment::shard_begin
  std::int32_t numel;      ///< at most kTileNumel
  std::int32_t parameter;  ///< index into Flat::parameters

  friend bool operator==(const Tile&, const Tile&) = default;
};

/// 16 for each thread of a block.
inline constexpr std::int64_t kTileNumel = 4096;
/// All but the first tile of a segment begin at a multiple of this, as does every full one, and all
/// but the first and the last are full.
inline constexpr std::int64_t kTileAlignment = 4;

}  // namespace tessera::shard
