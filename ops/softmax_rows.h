// Pieces of a softmax over one row in memory. Private to ops. Bits depend on values and length
// alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/lanes.h"
#include "ops/vector_math.h"

namespace tessera::ops {

/// The largest of x[0, numel); -inf if there is none.
inline float row_max(const float* x, std::int64_t numel) {
  const auto take_larger = [](auto& a, const auto& b) { a = a > b ? a : b; };
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) take_larger(lanes[l], x[i + l]);
  }
  for (std::int64_t l = 0; i + l < numel; ++l) take_larger(lanes[l], x[i + l]);
  return fold_lanes(lanes, take_larger);
}

/// x = exp(x - shift) for x[0, numel). Returns the sum.
inline float exp_row(float* x, std::int64_t numel, float shift) {
  return lane_sum(numel, [=](std::int64_t i) { return x[i] = exp(x[i] - shift); });
}

}  // namespace tessera::ops
