// What kernels share that walk tiles. For .cu files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "engine/tensor.h"
#include "shard/tile.h"

namespace tessera::shard {

/// Threads of a block, which take a tile in so many turns of 4 elements each.
inline constexpr int kTileThreads = 256;
inline constexpr int kTileTurns = static_cast<int>(kTileNumel / (kTileAlignment * kTileThreads));

inline const Tile* tiles_in(const engine::Tensor& table) {
  return reinterpret_cast<const Tile*>(table.raw());
}

/// At most `max_blocks`, which take the tiles of `table` in turn.
inline engine::LaunchShape tile_shape(const engine::Tensor& table, std::int64_t max_blocks) {
  return {.grid = dim3(static_cast<unsigned>(std::min(table.dim(0), max_blocks))),
          .block = dim3(kTileThreads)};
}

/// A tile of full size is taken by 16 bytes where the arrays begin at multiples of that, thread t
/// the 4 elements from quad_begin(tile, turn) on; of others thread t takes element t, and every
/// kTileThreads-th after it.
__device__ inline bool is_full(const Tile& tile) { return tile.numel == kTileNumel; }
__device__ inline std::int64_t quad_begin(const Tile& tile, int turn) {
  return tile.begin + kTileAlignment * (turn * kTileThreads + static_cast<int>(threadIdx.x));
}

}  // namespace tessera::shard
