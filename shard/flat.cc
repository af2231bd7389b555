#include "shard/flat.h"

#include <algorithm>
#include <array>
#include <bit>

namespace tessera::shard {

std::vector<Tile> tiles_of(std::span<const Segment> segments) {
  std::vector<Tile> tiles;
  for (const Segment& s : segments) {
    const std::int64_t end = s.shard_begin + s.numel;
    for (std::int64_t begin = s.shard_begin; begin < end;) {
      const std::int64_t aligned = begin / kTileAlignment * kTileAlignment;
      const std::int64_t tile_end = std::min(aligned + kTileNumel, end);
      tiles.push_back({.begin = begin,
                       .numel = static_cast<std::int32_t>(tile_end - begin),
                       .parameter = static_cast<std::int32_t>(s.parameter)});
      begin = tile_end;
    }
  }
  return tiles;
}

engine::Tensor make_tile_table(const engine::Memory& memory, std::span<const Segment> segments,
                               const std::string& name) {
  std::vector<std::int64_t> table;
  for (const Tile& tile : tiles_of(segments)) {
    const auto row = std::bit_cast<std::array<std::int64_t, 2>>(tile);
    table.insert(table.end(), row.begin(), row.end());
  }
  return engine::Tensor::from<std::int64_t>(memory, {std::ssize(table) / 2, 2}, table, name,
                                            engine::Category::kParameterShard);
}

}  // namespace tessera::shard
