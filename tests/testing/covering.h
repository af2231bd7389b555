// Few rows that show every pair of choices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/philox.h"

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

/// A column and a level of it, and another, later column and a level of that.
using LevelPair = std::tuple<std::size_t, int, std::size_t, int>;
using CoveringRow = std::vector<int>;  // a level for each column

struct CoveringRows {
  std::vector<CoveringRow> rows;
  std::set<LevelPair> impossible;  ///< pairs that no row was found for
};

/// Few rows in which any two columns show all pairs of their levels, of which column c has
/// `num_levels[c]`: row by row the best of 50 random ones. Rows that `is_allowed` refuses are left
/// out; a pair is impossible when 2000 random rows with it were refused.
inline CoveringRows covering_rows(
    const std::vector<int>& num_levels, const std::function<bool(const CoveringRow&)>& is_allowed =
                                            [](const CoveringRow&) { return true; }) {
  const std::size_t columns = num_levels.size();
  std::set<LevelPair> left;
  for (std::size_t a = 0; a < columns; ++a) {
    for (std::size_t b = a + 1; b < columns; ++b) {
      for (int i = 0; i < num_levels[a]; ++i) {
        for (int j = 0; j < num_levels[b]; ++j) left.insert({a, i, b, j});
      }
    }
  }
  const engine::RandomStream random{1, 2};
  std::uint64_t next = 0;
  const auto pairs_of = [&](const CoveringRow& row) {
    std::vector<LevelPair> pairs;
    for (std::size_t a = 0; a < columns; ++a) {
      for (std::size_t b = a + 1; b < columns; ++b) {
        if (left.contains({a, row[a], b, row[b]})) pairs.emplace_back(a, row[a], b, row[b]);
      }
    }
    return pairs;
  };
  CoveringRows found;
  while (!left.empty()) {
    const LevelPair wanted = *left.begin();
    const auto& [a, i, b, j] = wanted;
    CoveringRow best;
    std::vector<LevelPair> covered;
    int num_allowed = 0;
    for (int candidate = 0; candidate < (num_allowed > 0 ? 50 : 2000); ++candidate) {
      CoveringRow row(columns);
      for (std::size_t c = 0; c < columns; ++c) {
        row[c] = static_cast<int>(random.bits(next++) % static_cast<std::uint32_t>(num_levels[c]));
      }
      row[a] = i;
      row[b] = j;
      if (!is_allowed(row)) continue;
      ++num_allowed;
      std::vector<LevelPair> pairs = pairs_of(row);
      if (pairs.size() <= covered.size()) continue;
      best = row;
      covered = std::move(pairs);
    }
    if (num_allowed == 0) {
      found.impossible.insert(wanted);
      left.erase(wanted);
      continue;
    }
    for (const LevelPair& pair : covered) left.erase(pair);
    found.rows.push_back(best);
  }
  return found;
}

}  // namespace tessera::testing
