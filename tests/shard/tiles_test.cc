#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "shard/flat.h"
#include "shard/tile.h"

namespace tessera::shard {
namespace {

TEST(Tiles, CoverEverySegmentOnceAndInOrder) {
  const std::vector<Segment> segments = {{2, 0, 1, 3},
                                         {3, 0, 5, 4096},
                                         {5, 9, 4104, 3 * 4096},
                                         {6, 0, 20000, 1},
                                         {7, 0, 20003, 4096 + 1}};
  const std::vector<Tile> tiles = tiles_of(segments);
  auto tile = tiles.begin();
  for (const Segment& s : segments) {
    const auto first = tile;
    std::int64_t at = s.shard_begin;
    for (; at < s.shard_begin + s.numel; ++tile) {
      ASSERT_TRUE(tile != tiles.end());
      EXPECT_EQ(tile->begin, at);
      EXPECT_EQ(tile->parameter, static_cast<std::int32_t>(s.parameter));
      EXPECT_GT(tile->numel, 0);
      EXPECT_LE(tile->numel, kTileNumel);
      EXPECT_TRUE(tile == first || at % kTileAlignment == 0) << at;
      at += tile->numel;
      const bool is_between = tile != first && at < s.shard_begin + s.numel;
      EXPECT_TRUE(!is_between || tile->numel == kTileNumel) << at;
    }
    EXPECT_EQ(at, s.shard_begin + s.numel);
    // No more than there must be: what stands before the first multiple may cost one more.
    EXPECT_LE(tile - first, (s.numel + kTileAlignment - 1 + kTileNumel - 1) / kTileNumel);
  }
  EXPECT_TRUE(tile == tiles.end());
  EXPECT_TRUE(tiles_of({}).empty());
}

}  // namespace
}  // namespace tessera::shard
