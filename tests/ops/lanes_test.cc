#include "ops/lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/isa.h"

namespace tessera::ops {
namespace {

// The tree that fold_lanes() states, one number after the other.
float tree(std::vector<float> lanes, const std::function<float(float, float)>& combine) {
  while (lanes.size() > 1) {
    const std::size_t half = lanes.size() / 2;
    for (std::size_t l = 0; l < half; ++l) lanes[l] = combine(lanes[l], lanes[l + half]);
    lanes.resize(half);
  }
  return lanes[0];
}

TEST(FoldLanes, TakesTheUpperHalfOntoTheLower) {
  std::vector<float> lanes(kLanes);
  for (std::size_t seed = 0; seed < 20; ++seed) {
    // Of several magnitudes, so that another order has other bits.
    for (std::size_t l = 0; l < lanes.size(); ++l)
      lanes[l] =
          std::sin(static_cast<float>(l + 100 * seed)) * std::exp2(static_cast<float>(l % 7));
    const auto larger = [](float a, float b) { return a > b ? a : b; };
    const auto [sum, largest] = engine::with_isa([&] {
      return std::pair(fold_lanes(lanes.data(), [](auto& a, const auto& b) { a += b; }),
                       fold_lanes(lanes.data(), [](auto& a, const auto& b) { a = a > b ? a : b; }));
    });
    EXPECT_EQ(sum, tree(lanes, std::plus<>()));
    EXPECT_EQ(largest, tree(lanes, larger));
  }
}

TEST(FoldLanes, EveryLaneMayBeTheLargest) {
  for (std::size_t l = 0; l < static_cast<std::size_t>(kLanes); ++l) {
    std::vector<float> lanes(kLanes, -2.0f);
    lanes[l] = -1.0f;
    EXPECT_EQ(fold_lanes(lanes.data(), [](auto& a, const auto& b) { a = a > b ? a : b; }), -1.0f);
  }
}

TEST(LaneSum, AddsEveryTermOnceAndDoesNotDependOnAlignment) {
  for (const std::int64_t n : {0, 1, 3, 31, 32, 33, 64, 1025}) {
    std::vector<float> x(static_cast<std::size_t>(n + 8));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
    double exact = 0;
    for (std::int64_t i = 0; i < n; ++i) exact += x[static_cast<std::size_t>(i)];
    const float sum = lane_sum(n, [&](std::int64_t i) { return x[static_cast<std::size_t>(i)]; });
    EXPECT_NEAR(sum, exact, 1e-5) << n;
    for (std::size_t shift = 1; shift < 8; ++shift) {
      std::vector<float> moved(x.size() + shift);
      std::copy(x.begin(), x.end(), moved.begin() + static_cast<std::ptrdiff_t>(shift));
      EXPECT_EQ(lane_sum(n, [p = moved.data() + shift](std::int64_t i) { return p[i]; }), sum);
    }
  }
}

TEST(ToLanes, RoundsUp) {
  EXPECT_EQ(to_lanes(0), 0);
  EXPECT_EQ(to_lanes(1), kLanes);
  EXPECT_EQ(to_lanes(kLanes), kLanes);
  EXPECT_EQ(to_lanes(kLanes + 1), 2 * kLanes);
  EXPECT_EQ(to_lanes(1 - kLanes), 0);  // as where a query sees nothing
}

}  // namespace
}  // namespace tessera::ops
