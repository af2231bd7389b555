// Pieces of a softmax over one row in memory. Private to ops. Bits depend on values and length
// alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "engine/dtype.h"
#include "ops/vector_math.h"

namespace tessera::ops {

/// The largest of x[0, numel); -inf if there is none.
inline float row_max(const float* x, std::int64_t numel) {
  const auto larger = [](float a, float b) { return a > b ? a : b; };
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) lanes[l] = larger(lanes[l], x[i + l]);
  }
  for (std::int64_t l = 0; i + l < numel; ++l) lanes[l] = larger(lanes[l], x[i + l]);
  return fold_lanes(lanes, larger);
}

/// y = exp((x - shift) * scale) for x[0, numel), rounded if P is bf16; an f32 y is x itself.
/// Returns the sum, of what was not rounded.
template <class P>
float exp_row(float* x, P* y, std::int64_t numel, float shift, float scale = 1) {
  return lane_sum(numel, [=](std::int64_t i) {
    const float e = exp((x[i] - shift) * scale);
    if constexpr (std::is_same_v<P, float>) {
      x[i] = e;  // so that the compiler sees one row
    } else {
      engine::store_f32(y[i], e);
    }
    return e;
  });
}

}  // namespace tessera::ops
