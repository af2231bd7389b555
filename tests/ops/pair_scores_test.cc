// Softmax in pairs and its backward, against double precision: values, roundings, places, bounds.
#include "ops/pair_scores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "engine/dtype.h"
#include "engine/gemm/pairs.h"
#include "engine/isa.h"
#include "engine/philox.h"

namespace tessera::ops {
namespace {

using engine::BFloat16;
using engine::Pair;
using engine::RandomStream;
using Index = std::int64_t;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Pair kUntouched = 0xABCDABCD;

// A CPU without the instructions is never asked to.
bool can_run() {
  const bool has_instructions = engine::isa() >= engine::Isa::kV4Bf16;
  if (!has_instructions) {
    EXPECT_FALSE(engine::multiplies_pairs());
  }
  return has_instructions;
}

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

float half_of(Pair pair, Index half) {
  return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xFFFF0000u);
}

// Nearest bf16; what is below 2^-126 is 0.
float rounded(double x) {
  const auto value = static_cast<float>(x);
  return std::abs(value) < 0x1p-126f ? 0 : BFloat16::from_float(value).to_float();
}

// One of its two neighbours if x, which has an error, is near the middle between them.
void expect_rounded(float got, double x, double error) {
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(got)) << got;
    return;
  }
  const float low = rounded(x - error), high = rounded(x + error);
  EXPECT_GE(got, std::min(low, high)) << x;
  EXPECT_LE(got, std::max(low, high)) << x;
}

// Scores of a tile of some queries, as a product leaves them: garbage from `keys` on.
struct Tile {
  Tile(Index row, Index rows, Index key, Index keys, bool causal, float magnitude)
      : tile{row, rows, key, keys},
        layout{.batch = 1,
               .tokens = 4096,
               .heads = 1,
               .kv_heads = 1,
               .head_size = 8,
               .scale = 0.3f,
               .causal = causal},
        scores(at(rows * tile.ld()), 7e30f) {
    const RandomStream random{7, static_cast<std::uint64_t>(row * 131 + keys)};
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < keys; ++c)
        scores[at(r * tile.ld() + c)] =
            magnitude * random.normal(static_cast<std::uint64_t>(r * keys + c));
  }
  bool sees(Index r, Index c) const {
    return c < tile.keys && (!layout.causal || tile.key + c <= tile.row + r);
  }
  float score(Index r, Index c) const { return scores[at(r * tile.ld() + c)]; }

  ScoreTile tile;
  AttentionLayout layout;
  std::vector<float> scores;
};

// Softmax over tiles, one after the other, of the same rows.
struct Softmax {
  static constexpr Index kWidth = 16;
  static constexpr std::size_t kGuard = 16;  // as many as are stored at once

  explicit Softmax(Index rows)
      : num_rows(at(rows)),
        largest(num_rows + kGuard, 5),
        sum(num_rows + kGuard, 5),
        out(num_rows * kWidth + 1, 3) {}

  std::vector<Pair> update(const Tile& t) {
    std::vector<Pair> p(at(t.tile.rows * t.tile.ld() / 2 + 1), kUntouched);
    std::vector<float> scores = t.scores;
    update_pair_softmax(t.tile, t.layout, scores.data(), p.data(), largest.data(), sum.data(),
                        out.data(), kWidth);
    EXPECT_EQ(p.back(), kUntouched);
    for (std::size_t i = num_rows; i < num_rows + kGuard; ++i) {
      EXPECT_EQ(largest[i], 5);
      EXPECT_EQ(sum[i], 5);
    }
    EXPECT_EQ(out.back(), 3);
    return p;
  }

  std::size_t num_rows;
  std::vector<float> largest, sum, out;
};

// Largest of what is seen of a row, and the sum of exponentials relative to it.
struct Exact {
  double largest = -kInfinity, sum = 0;

  void add(const Tile& t, Index r) {
    double now = largest;
    for (Index c = 0; c < t.tile.keys; ++c)
      if (t.sees(r, c)) now = std::max(now, static_cast<double>(t.score(r, c)));
    const auto scale = static_cast<double>(t.layout.scale);
    sum *= std::isinf(largest) ? 0 : std::exp((largest - now) * scale);
    largest = now;
    for (Index c = 0; c < t.tile.keys; ++c)
      if (t.sees(r, c)) sum += std::exp((static_cast<double>(t.score(r, c)) - now) * scale);
  }
};

// As many bits as the exponent's argument loses, and those of 2^x and of sums.
double relative_error(double exponent) { return 1e-6 + 3e-7 * std::abs(exponent); }

TEST(PairScoresTest, SoftmaxIsThatOfDoublePrecision) {
  if (!can_run()) return;
  for (const auto& [row, rows, keys] : std::vector<std::tuple<Index, Index, Index>>{{0, 1, 1},
                                                                                    {0, 24, 24},
                                                                                    {24, 24, 48},
                                                                                    {48, 15, 63},
                                                                                    {48, 16, 64},
                                                                                    {48, 17, 65},
                                                                                    {240, 16, 256},
                                                                                    {31, 3, 34},
                                                                                    {96, 24, 40}}) {
    for (const bool causal : {false, true}) {
      for (const float magnitude : {0.0f, 3.0f, 100.0f, 1000.0f, 1e6f, 1e12f}) {
        const Tile t(row, rows, 0, keys, causal, magnitude);
        Softmax softmax(rows);
        const std::vector<Pair> p = softmax.update(t);
        for (Index r = 0; r < rows; ++r) {
          SCOPED_TRACE(::testing::Message() << rows << " x " << keys << " row " << r);
          Exact exact;
          exact.add(t, r);
          const double scale = t.layout.scale, lse = exact.largest * scale + std::log(exact.sum);
          EXPECT_EQ(softmax.largest[at(r)], exact.largest);
          EXPECT_NEAR(softmax.sum[at(r)], exact.sum, exact.sum * 3e-6);
          EXPECT_NEAR(softmax_lse(softmax.largest[at(r)], softmax.sum[at(r)], t.layout.scale), lse,
                      2e-6 + 2e-7 * std::abs(lse));
          for (Index c = 0; c < t.tile.ld(); ++c) {
            const float got = half_of(p[at((r * t.tile.ld() + c) / 2)], c % 2);
            if (!t.sees(r, c)) {
              ASSERT_EQ(got, 0) << c;
              continue;
            }
            const double exponent = (t.score(r, c) - exact.largest) * scale,
                         want = std::exp(exponent);
            expect_rounded(got, want, want * relative_error(exponent));
          }
        }
      }
    }
  }
}

TEST(PairScoresTest, LaterTilesRescaleWhatWasSummed) {
  if (!can_run()) return;
  constexpr Index kRows = 24;
  Softmax softmax(kRows);
  std::vector<Exact> exact(kRows);
  std::vector<double> first(kRows);
  for (const auto& [key, keys, magnitude] : std::vector<std::tuple<Index, Index, float>>{
           {0, 256, 10.0f}, {256, 256, 30.0f}, {512, 100, 1.0f}, {612, 8, 50.0f}}) {
    const Tile t(600, kRows, key, keys, true, magnitude);
    softmax.update(t);
    for (Index r = 0; r < kRows; ++r) {
      exact[at(r)].add(t, r);
      if (key == 0) first[at(r)] = exact[at(r)].largest;
      const double scale = t.layout.scale,
                   lse = exact[at(r)].largest * scale + std::log(exact[at(r)].sum);
      EXPECT_NEAR(softmax_lse(softmax.largest[at(r)], softmax.sum[at(r)], t.layout.scale), lse,
                  1e-5)
          << key << r;
      const double exponent = (first[at(r)] - exact[at(r)].largest) * scale,
                   factor = std::exp(exponent);
      for (Index i = 0; i < Softmax::kWidth; ++i)
        EXPECT_NEAR(softmax.out[at(r * Softmax::kWidth + i)], 3 * factor,
                    3 * factor * relative_error(exponent) + 1e-37);
    }
  }
}

// What is summed in f32 shows more of 2^x than probabilities do.
TEST(PairScoresTest, RescalingIsWithinThreeUlp) {
  if (!can_run()) return;
  constexpr Index kRows = 24, kKeys = 32;
  for (Index step = 0; step < 60; ++step) {
    Softmax softmax(kRows);
    softmax.update(Tile(0, kRows, 0, kKeys, false, 0));  // whose largest is 0
    Tile later(0, kRows, kKeys, kKeys, false, 0);
    later.layout.scale = 1;
    for (Index r = 0; r < kRows; ++r)
      later.scores[at(r * later.tile.ld() + 7)] = 0.062f * static_cast<float>(step * kRows + r);
    softmax.update(later);
    for (Index r = 0; r < kRows; ++r) {
      const double x = -softmax.largest[at(r)] * kLog2E;  // in f32, as it is computed
      const double want = x < -126 ? 0 : 3 * std::exp2(x);
      EXPECT_NEAR(softmax.out[at(r * Softmax::kWidth)], want, want * 3 * 0x1p-23) << x;
    }
  }
}

// A row that sees nothing of a tile, and one whose largest score is no larger, keep their bits.
TEST(PairScoresTest, WhatNeedsNoRescalingKeepsItsBits) {
  if (!can_run()) return;
  Softmax softmax(24);
  softmax.update(Tile(256, 24, 0, 256, true, 10.0f));
  const std::vector<float> largest = softmax.largest, sum = softmax.sum, out = softmax.out;
  Tile later(256, 24, 256, 24, true, 0.0f);
  std::fill(later.scores.begin(), later.scores.end(), -1e4f);
  softmax.update(later);
  EXPECT_EQ(softmax.largest, largest);
  EXPECT_EQ(softmax.sum, sum);
  EXPECT_EQ(softmax.out, out);
  Softmax equal(24);
  const std::vector<float> unscaled = equal.out;
  equal.update(Tile(256, 24, 0, 256, true, 0));
  equal.update(Tile(256, 24, 256, 24, true, 0));
  EXPECT_EQ(equal.out, unscaled);
}

TEST(PairScoresTest, WhatIsNotFiniteStaysSo) {
  if (!can_run()) return;
  for (const std::uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7FFFFFFFu, 0x7F800000u})
    for (const Index c : {0, 5, 17, 31, 40}) {
      Tile t(40, 24, 0, 64, true, 3);
      t.scores[at(3 * t.tile.ld() + c)] = std::bit_cast<float>(bits);
      Softmax softmax(24);
      const std::vector<Pair> p = softmax.update(t);
      for (Index r = 0; r < 24; ++r)
        EXPECT_EQ(std::isnan(softmax.sum[at(r)]), r == 3) << bits << " " << r;
      EXPECT_TRUE(std::isnan(half_of(p[at((3 * t.tile.ld() + c) / 2)], c % 2)));
    }
  Tile t(0, 2, 0, 32, false, 3);
  t.scores[9] = -kInfinity;
  Softmax softmax(2);
  EXPECT_EQ(half_of(softmax.update(t)[4], 1), 0);
  EXPECT_TRUE(std::isfinite(softmax.sum[0]));
}

TEST(PairScoresTest, SmallProbabilitiesEndInZero) {
  if (!can_run()) return;
  Tile t(0, 1, 0, 32, false, 0);
  t.layout.scale = 1;
  for (Index c = 1; c < 32; ++c) t.scores[at(c)] = -80.0f - static_cast<float>(c) / 2;
  Softmax softmax(1);
  const std::vector<Pair> p = softmax.update(t);
  for (Index c = 1; c < 32; ++c) {
    const double want = std::exp(static_cast<double>(t.scores[at(c)]));
    expect_rounded(half_of(p[at(c / 2)], c % 2), want, want * 1e-5);
  }
}

TEST(PairScoresTest, BackwardIsThatOfDoublePrecision) {
  if (!can_run()) return;
  for (const auto& [row, rows, key, keys] :
       std::vector<std::tuple<Index, Index, Index, Index>>{{0, 1, 0, 1},
                                                           {0, 24, 0, 24},
                                                           {24, 24, 0, 48},
                                                           {48, 15, 0, 63},
                                                           {63, 2, 0, 65},
                                                           {240, 16, 0, 256},
                                                           {31, 3, 0, 34},
                                                           {256, 24, 256, 24},
                                                           {250, 24, 256, 18}}) {
    for (const bool causal : {false, true}) {
      const Tile t(row, rows, key, keys, causal, 4.0f);
      const Tile slopes(row + 1, rows, key, keys, causal, 1.0f);  // dy v^T
      std::vector<float> lse(at(rows)), deltas(at(rows)), scores = t.scores;
      for (Index r = 0; r < rows; ++r) {
        Exact exact;
        exact.add(t, r);
        const double own = exact.largest * t.layout.scale + std::log(exact.sum);
        lse[at(r)] = exact.sum == 0 ? 1.5f : static_cast<float>(own);
        deltas[at(r)] = 0.25f * static_cast<float>(r % 7) - 0.5f;
      }
      const Index ld = t.tile.ld(), num_pairs = (rows + 1) / 2;
      std::vector<Pair> p_rows(at(num_pairs * ld + 1), kUntouched), ds_rows = p_rows,
                                                                    ds_cols = p_rows;
      ds_cols.assign(at(rows * ld / 2 + 1), kUntouched);
      pair_scores_backward(t.tile, t.layout, scores.data(), slopes.scores.data(),
                           {p_rows.data(), ds_rows.data(), ds_cols.data()}, lse.data(),
                           deltas.data());
      EXPECT_EQ(p_rows.back(), kUntouched);
      EXPECT_EQ(ds_rows.back(), kUntouched);
      EXPECT_EQ(ds_cols.back(), kUntouched);
      for (Index r = 0; r < 2 * num_pairs; ++r) {
        SCOPED_TRACE(::testing::Message() << rows << " x " << keys << " row " << r);
        for (Index c = 0; c < ld; ++c) {
          const float p = half_of(p_rows[at(r / 2 * ld + c)], r % 2);
          const float ds = half_of(ds_rows[at(r / 2 * ld + c)], r % 2);
          if (r >= rows || !t.sees(r, c)) {
            ASSERT_EQ(p, 0) << c;
            ASSERT_EQ(ds, 0) << c;
            if (r < rows) {
              ASSERT_EQ(half_of(ds_cols[at((r * ld + c) / 2)], c % 2), 0) << c;
            }
            continue;
          }
          const double want = std::exp(static_cast<double>(t.score(r, c)) * t.layout.scale -
                                       static_cast<double>(lse[at(r)]));
          const double want_ds = want * (static_cast<double>(slopes.score(r, c)) - deltas[at(r)]);
          expect_rounded(p, want, want * 4e-6);
          expect_rounded(ds, want_ds, std::abs(want_ds) * 4e-6 + want * 1e-6);
          ASSERT_EQ(half_of(ds_cols[at((r * ld + c) / 2)], c % 2), ds) << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::ops
