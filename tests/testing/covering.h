// Few rows that show every pair of choices.
#pragma once

#include <array>
#include <cstddef>

namespace tessera::testing {

inline constexpr int kCoveringRows = 16;

/// Row `row` of an orthogonal array of strength 2 (Bush 1952, over the field of 4 elements): in its
/// 16 rows, any two of the 5 columns show all 16 pairs of levels 0 to 3.
inline std::array<int, 5> covering_levels(int row) {
  constexpr std::array<int, 4> kTimes2 = {0, 2, 3, 1}, kTimes3 = {0, 3, 1, 2};
  const int a = row / 4, b = row % 4;
  const auto column = static_cast<std::size_t>(b);
  return {a, b, a ^ b, a ^ kTimes2[column], a ^ kTimes3[column]};
}

}  // namespace tessera::testing
