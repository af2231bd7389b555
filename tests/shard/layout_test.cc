// Flat layouts, exhaustively for small cases: every element is held once, everything is aligned.
#include "shard/layout.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/error.h"

namespace tessera::shard {
namespace {

void expect_every_element_once(const std::vector<std::int64_t>& numels, int world) {
  const Layout layout(numels, world);
  ASSERT_EQ(layout.shard_numel() % kAlignmentNumel, 0);
  ASSERT_EQ(layout.flat_numel(), layout.shard_numel() * world);
  std::int64_t value_numel = 0, aligned_numel = 0;
  std::vector<std::vector<int>> held(numels.size());
  for (std::size_t i = 0; i < numels.size(); ++i) {
    ASSERT_EQ(layout.offset(i) % kAlignmentNumel, 0);
    held[i].resize(static_cast<std::size_t>(numels[i]));
    value_numel += numels[i];
    aligned_numel += (numels[i] + kAlignmentNumel - 1) / kAlignmentNumel * kAlignmentNumel;
  }
  ASSERT_EQ(layout.value_numel(), value_numel);
  ASSERT_LT(layout.flat_numel() - aligned_numel, kAlignmentNumel * world) << "no needless padding";
  for (int rank = 0; rank < world; ++rank) {
    std::int64_t end = 0;
    for (const Segment& s : layout.segments(rank)) {
      ASSERT_GT(s.numel, 0);
      ASSERT_GE(s.shard_begin, end);
      end = s.shard_begin + s.numel;
      ASSERT_LE(end, layout.shard_numel());
      ASSERT_EQ(rank * layout.shard_numel() + s.shard_begin,
                layout.offset(s.parameter) + s.parameter_begin);
      for (std::int64_t k = 0; k < s.numel; ++k) {
        ++held[s.parameter].at(static_cast<std::size_t>(s.parameter_begin + k));
      }
    }
  }
  for (const auto& parameter : held) {
    for (const int count : parameter) ASSERT_EQ(count, 1);
  }
}

TEST(Layout, EveryElementIsHeldOnceAndNothingElse) {
  const std::vector<std::int64_t> sizes = {0, 1, 127, 128, 129, 300, 1000};
  for (const std::int64_t a : sizes) {
    for (const std::int64_t b : sizes) {
      for (const std::int64_t c : sizes) {
        for (int world = 1; world <= 9; ++world) {
          ASSERT_NO_FATAL_FAILURE(expect_every_element_once({a, b, c}, world))
              << a << " " << b << " " << c << " world " << world;
        }
      }
    }
  }
}

TEST(Layout, HoldsInBigWorldsToo) {
  for (const int world : {127, 128, 129, 130, 257, 1000}) {
    for (const std::int64_t a : {1, 128 * world - 1, 128 * world, 128 * world + 1}) {
      for (const std::int64_t b : {0, 1, 300, 128 * world}) {
        ASSERT_NO_FATAL_FAILURE(expect_every_element_once({a, b}, world))
            << a << " " << b << " world " << world;
      }
    }
  }
}

TEST(Layout, NoParametersIsEmpty) {
  const Layout layout({}, 3);
  EXPECT_EQ(layout.flat_numel(), 0);
  EXPECT_TRUE(layout.segments(2).empty());
}

TEST(Layout, RefusesWhatCannotBe) {
  const std::vector<std::int64_t> negative = {-1}, huge = {INT64_MAX};
  EXPECT_THROW(Layout(negative, 1), engine::InvalidArgument);
  EXPECT_THROW(Layout(huge, 1), engine::InvalidArgument);
  EXPECT_THROW(Layout({}, 0), engine::InvalidArgument);
  EXPECT_THROW(Layout({}, 2).segments(2), engine::InvalidArgument);
}

}  // namespace
}  // namespace tessera::shard
