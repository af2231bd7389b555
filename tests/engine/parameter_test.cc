// How parameters start does not depend on how they are split.
#include "engine/parameter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace tessera::engine {
namespace {

std::vector<float> write(const Init& init, std::int64_t begin, std::int64_t numel,
                         std::string_view name = "w", std::uint64_t seed = 1) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  init.write(values.data(), begin, numel, name, seed);
  return values;
}

// A vector of layers that grows would leave their blocks, and all who know these, with addresses of
// what is gone.
struct Layer {
  Parameter weight;
  Block block{"layer", {&weight}};
};
static_assert(!std::is_move_constructible_v<Parameter> && !std::is_move_assignable_v<Parameter>);
static_assert(!std::is_move_constructible_v<Block> && !std::is_move_assignable_v<Block>);
static_assert(!std::is_move_constructible_v<Layer> && std::is_default_constructible_v<Layer>);

TEST(Init, PiecesEqualTheWhole) {
  constexpr std::int64_t kNumel = 1001;
  for (const Init& init : {Init::zeros(), Init::ones(), Init::normal(0.02f), Init::uniform(3)}) {
    const std::vector<float> whole = write(init, 0, kNumel);
    for (const std::int64_t piece : {1, 2, 3, 7, 128, 1000}) {
      std::vector<float> pieces;
      for (std::int64_t begin = 0; begin < kNumel; begin += piece) {
        const auto part = write(init, begin, std::min(piece, kNumel - begin));
        pieces.insert(pieces.end(), part.begin(), part.end());
      }
      EXPECT_EQ(pieces, whole) << "piece " << piece;
    }
  }
}

TEST(Init, DependsOnNameAndSeed) {
  const Init init = Init::normal(1);
  EXPECT_EQ(write(init, 0, 10), write(init, 0, 10));
  EXPECT_NE(write(init, 0, 10), write(init, 0, 10, "v"));
  EXPECT_NE(write(init, 0, 10), write(init, 0, 10, "w", 2));
}

TEST(Init, HasItsScale) {
  constexpr std::int64_t kNumel = 100'000;
  double squares = 0;
  for (const float v : write(Init::normal(0.02f), 0, kNumel)) squares += double{v} * v;
  EXPECT_NEAR(std::sqrt(squares / kNumel), 0.02, 0.0002);
  const std::vector<float> uniform = write(Init::uniform(3), 0, kNumel);
  const auto [least, most] = std::minmax_element(uniform.begin(), uniform.end());
  EXPECT_GE(*least, -3);
  EXPECT_LT(*least, -2.99f);
  EXPECT_LE(*most, 3);
  EXPECT_GT(*most, 2.99f);
  EXPECT_EQ(write(Init::zeros(), 0, 3), std::vector<float>(3, 0.0f));
  EXPECT_EQ(write(Init::ones(), 0, 3), std::vector<float>(3, 1.0f));
}

TEST(Materialize, GivesValuesAndGradients) {
  const Memory memory({.poison = true});
  Parameter w{.name = "w", .shape = {2, 3}, .init = Init::normal(1)};
  Parameter frozen{.name = "frozen", .shape = {4}, .init = Init::ones(), .trainable = false};
  materialize({&w, &frozen}, memory, 1, DType::kBF16);
  const std::vector<float> expected = write(w.init, 0, 6);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(w.value.data<BFloat16>()[i].bits, BFloat16::from_float(expected[i]).bits);
    EXPECT_EQ(w.grad.data<float>()[i], 0);
  }
  EXPECT_EQ(w.value.shape(), w.shape);
  EXPECT_EQ(w.grad.shape(), w.shape);
  EXPECT_EQ(frozen.value.data<BFloat16>()[3].to_float(), 1);
  EXPECT_FALSE(frozen.grad.defined());
  const MemoryStats stats = memory.stats();
  EXPECT_EQ(stats.current_nbytes[std::size_t(Category::kParameterShard)], 2 * (6 + 4));
  EXPECT_EQ(stats.current_nbytes[std::size_t(Category::kGradient)], 4 * 6);
  EXPECT_EQ(stats.total_nbytes, 20 + 24) << "no f32 copy is kept";
}

}  // namespace
}  // namespace tessera::engine
