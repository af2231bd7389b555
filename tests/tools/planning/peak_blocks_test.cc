// Which blocks are told behind a peak, by hand.
#include "tools/planning/peak_blocks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "engine/tensor.h"

namespace tessera::tools {
namespace {

using engine::Category;
using Texts = std::vector<std::string>;

Texts most(const PeakBlocks& blocks, Category category) {
  Texts texts;
  for (const PeakBlocks::Kind& kind : blocks.most(category)) {
    texts.push_back(fmt::format("{} x {} of {}", kind.count, kind.what, kind.nbytes));
  }
  return texts;
}

TEST(PeakBlocks, AreThoseOfTheFirstMomentWithMostSinceTheBegin) {
  std::array<std::byte, 8> at{};
  PeakBlocks blocks;
  blocks.on_allocate(&at[0], 4096, Category::kActivation, "a");
  blocks.on_tensor(&at[0], {8, 128}, engine::DType::kF32);
  blocks.on_allocate(&at[1], 1024, Category::kActivation, "b");
  blocks.on_allocate(&at[2], 9000, Category::kOptimizer, "m");
  const Texts first = {"1 x 1,024 B, b of 1024", "1 x 4 B x 8 x 128, a of 4096"};
  EXPECT_EQ(most(blocks, Category::kActivation), first);
  blocks.on_free(&at[0]);
  blocks.on_allocate(&at[0], 4096, Category::kActivation, "c");
  EXPECT_EQ(most(blocks, Category::kActivation), first) << "as much again, at the same place";

  blocks.begin();
  const Texts begin = {"1 x 1,024 B, b of 1024", "1 x 4,096 B, c of 4096"};
  EXPECT_EQ(most(blocks, Category::kActivation), begin);
  blocks.on_free(&at[0]);
  blocks.on_allocate(&at[3], 100, Category::kActivation, "d");
  EXPECT_EQ(most(blocks, Category::kActivation), begin) << "less than at the begin";
  for (const std::size_t i : {4, 5}) {
    blocks.on_allocate(&at[i], 8000, Category::kActivation, "e");
  }
  blocks.on_free(&at[1]);
  EXPECT_EQ(most(blocks, Category::kActivation),
            (Texts{"1 x 1,024 B, b of 1024", "1 x 100 B, d of 100", "2 x 8,000 B, e of 8000"}));
  EXPECT_EQ(most(blocks, Category::kOptimizer), Texts{"1 x 9,000 B, m of 9000"});
  EXPECT_EQ(most(blocks, Category::kGradient), Texts());
}

}  // namespace
}  // namespace tessera::tools
