// A row of Flat::segment_table, as kernels read it.
#pragma once

#include <cstdint>

namespace tessera::shard {

struct SegmentRow {
  std::int64_t begin;      ///< Segment::shard_begin
  std::int64_t numel;      ///< Segment::numel
  std::int64_t parameter;  ///< index into Flat::parameters
};

/// Rows that one launch can take: the height of a grid.
inline constexpr std::int64_t kMaxSegmentRows = 65535;

}  // namespace tessera::shard
