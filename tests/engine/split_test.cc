// f32 products in parts of bf16: on tiles that any CPU can do without, and by the instructions of
// AMX, which a CPU that has none traps. The names of the tests say which ran: portable, and amx or
// trapped.
#include "engine/gemm/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/error.h"
#include "engine/gemm/amx_tiles.h"
#include "engine/isa.h"
#include "engine/philox.h"
#include "tests/engine/amx_traps.h"

namespace tessera::engine {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

// Linux is asked once, for all tests.
const std::vector<std::string>& tiles_here() {
  static const std::vector<std::string> tiles = []() -> std::vector<std::string> {
    try {
      request_amx();
      return {"portable", "amx"};
    } catch (const InvalidArgument& error) {
      std::cout << "instructions on tiles are trapped: " << error.what() << std::endl;
      trap_tile_instructions();
      return {"portable", "trapped"};
    }
  }();
  return tiles;
}

// (rows, cols) of floats, stored transposed or not, `ld` apart; NaN between rows.
struct Matrix {
  Matrix(std::int64_t num_rows, std::int64_t num_cols, bool is_transposed = false,
         std::int64_t padding = 0, std::int64_t offset = 0)
      : rows(num_rows),
        cols(num_cols),
        ld((is_transposed ? num_rows : num_cols) + padding),
        transposed(is_transposed),
        storage(static_cast<std::size_t>(offset + ld * (is_transposed ? num_cols : num_rows)), NAN),
        data(storage.data() + offset) {}
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  float& operator()(std::int64_t i, std::int64_t j) const {
    return data[transposed ? j * ld + i : i * ld + j];
  }
  // What `fn(index)` gives for each element, row by row.
  template <class Fn>
  Matrix& fill(Fn fn) {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j)
        (*this)(i, j) = fn(static_cast<std::uint64_t>(i * cols + j));
    return *this;
  }
  Matrix& fill_normal(std::uint64_t stream) {
    return fill([random = RandomStream{1, stream}](std::uint64_t i) { return random.normal(i); });
  }
  std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> all;
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j)
        all.push_back(std::bit_cast<std::uint32_t>((*this)(i, j)));
    return all;
  }

  const std::int64_t rows, cols, ld;
  const bool transposed;
  std::vector<float> storage;
  float* const data;
};

SplitProduct product_of(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate) {
  return {.a = a.data,
          .b = b.data,
          .c = c.data,
          .lda = a.ld,
          .ldb = b.ld,
          .ldc = c.ld,
          .m = c.rows,
          .n = c.cols,
          .k = a.cols,
          .a_transposed = a.transposed,
          .b_transposed = b.transposed,
          .accumulate = accumulate};
}

class SplitTest : public ::testing::TestWithParam<std::string> {
 protected:
  // With as much scratch as it asks for, and not a byte more written.
  static void run(const SplitProduct& product) {
    constexpr std::size_t kGuard = 64;
    const auto nbytes = static_cast<std::size_t>(product.scratch_nbytes());
    std::vector<std::byte> space(nbytes + 64 + kGuard, std::byte{0x7b});
    const auto address = reinterpret_cast<std::uintptr_t>(space.data());
    std::byte* const scratch = space.data() + (64 - address % 64) % 64;
    GetParam() == "portable" ? product.run_portably(scratch) : product.run(scratch);
    for (std::size_t i = 0; i < kGuard; ++i) ASSERT_EQ(scratch[nbytes + i], std::byte{0x7b});
  }
  static void multiply(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate = false) {
    run(product_of(a, b, c, accumulate));
  }

  // Expects that every element is within the bound of [Note: three parts of an f32].
  static void expect_within_bound(const Matrix& a, const Matrix& b, bool accumulate) {
    Matrix c(a.rows, b.cols, false, 3, 1);
    c.fill_normal(3);
    const Matrix before(a.rows, b.cols);
    for (std::int64_t i = 0; i < c.rows; ++i)
      for (std::int64_t j = 0; j < c.cols; ++j) before(i, j) = accumulate ? c(i, j) : 0;
    multiply(a, b, c, accumulate);
    const std::int64_t k = a.cols;
    const std::int64_t num_packs = (k + 31) / 32;
    const auto additions = static_cast<double>(6 * num_packs + 21);
    for (std::int64_t i = 0; i < c.rows; ++i)
      for (std::int64_t j = 0; j < c.cols; ++j) {
        double want = before(i, j), magnitude = std::abs(want), operands = 0;
        for (std::int64_t l = 0; l < k; ++l) {
          const double term = static_cast<double>(a(i, l)) * static_cast<double>(b(l, j));
          want += term;
          magnitude += std::abs(term);
          operands +=
              std::abs(static_cast<double>(a(i, l))) + std::abs(static_cast<double>(b(l, j)));
        }
        const double bound = 1.02 * 0x1p-24 * additions * magnitude +
                             0x1p-126 * (3 * operands + static_cast<double>(7 * k + 210));
        ASSERT_LE(std::abs(c(i, j) - want), bound) << i << " " << j << " of " << want;
      }
  }
};

using Layout = std::tuple<bool, bool, bool>;  // A and B transposed, C added to
const std::vector<Layout> kLayouts = {
    {false, false, false}, {false, true, true}, {true, false, true}, {true, true, false}};

// One block and parts of one; several along each side; two and more panels of k.
TEST_P(SplitTest, IsWithinItsBoundForEveryLayoutAndShape) {
  for (const auto& [m, n, k] : std::vector<std::tuple<int, int, int>>{{1, 1, 1},
                                                                      {32, 32, 32},
                                                                      {31, 33, 5},
                                                                      {33, 31, 64},
                                                                      {64, 65, 63},
                                                                      {70, 97, 130},
                                                                      {40, 35, 600},
                                                                      {33, 20, 1100}})
    for (const auto& [ta, tb, accumulate] : kLayouts) {
      SCOPED_TRACE(::testing::Message() << m << " " << n << " " << k << " " << ta << tb);
      Matrix a(m, k, ta, 2, 1), b(k, n, tb, 1, 3);
      expect_within_bound(a.fill_normal(1), b.fill_normal(2), accumulate);
      if (HasFatalFailure()) return;
    }
}

// Few columns, and significands that leave most to the parts that come last.
TEST_P(SplitTest, EachPartProductCounts) {
  for (const int k : {1, 2, 3, 17, 31}) {
    for (const std::uint32_t pattern : {0x3fffffffu, 0x3f80ffffu, 0x3f817fffu, 0x3f80ff7fu,
                                        0x3f808080u, 0x3f80807fu, 0x3fff7fffu}) {
      Matrix a(35, k), b(k, 34);
      const auto with_sign = [=](std::uint64_t seed) {
        return [=](std::uint64_t i) {
          const std::uint32_t below = static_cast<std::uint32_t>(i % 5);
          return std::bit_cast<float>((pattern - below) |
                                      static_cast<std::uint32_t>((i * seed) >> 3 & 1) << 31);
        };
      };
      expect_within_bound(a.fill(with_sign(7)), b.fill(with_sign(5)), false);
      if (HasFatalFailure()) return;
    }
  }
}

// One column: nothing but the three products that are left out, and a rounding of each sum.
TEST_P(SplitTest, WhatIsLeftOutIsLessThanFourRoundings) {
  Matrix a(256, 1), b(1, 256), c(256, 256);
  // Second parts of any size, and third ones as large as they can be if the second is rounded, and
  // if it were not.
  const auto number = [](std::uint64_t i) {
    const auto index = static_cast<std::uint32_t>(i);
    return std::bit_cast<float>(0x3f800000u | index << 8 | (index % 2 == 0 ? 0x80u : 0xffu));
  };
  a.fill(number), b.fill(number);
  multiply(a, b, c);
  for (std::int64_t i = 0; i < c.rows; ++i)
    for (std::int64_t j = 0; j < c.cols; ++j) {
      const double want = static_cast<double>(a(i, 0)) * static_cast<double>(b(0, j));
      ASSERT_LE(std::abs(c(i, j) - want), want * (0x1.12p-22 + 1.1 * 0x1p-24)) << i << " " << j;
    }
}

// Magnitudes far apart, and terms that cancel all but their last bits.
TEST_P(SplitTest, IsWithinItsBoundWhereTermsCancelAndDiffer) {
  const RandomStream random{5, 1};
  for (const int spread : {4, 30, 60}) {
    Matrix a(40, 200), b(200, 40);
    const auto scaled = [&](std::uint64_t offset) {
      return [&random, spread, offset](std::uint64_t i) {
        return std::ldexp(
            random.normal(offset + i),
            static_cast<int>(i * 2654435761u % static_cast<unsigned>(2 * spread)) - spread);
      };
    };
    expect_within_bound(a.fill(scaled(0)), b.fill(scaled(100'000)), spread == 4);
    for (int l = 0; l + 1 < 200; l += 2) {
      for (int i = 0; i < 40; ++i) a(i, l + 1) = a(i, l);
      for (int j = 0; j < 40; ++j)
        b(l + 1, j) = -b(l, j) * (1 + static_cast<float>(j % 3) * 0x1p-22f);
    }
    expect_within_bound(a, b, false);
  }
}

TEST_P(SplitTest, NumbersBelowTheNormalOnesAreLostAndNothingElse) {
  const RandomStream random{5, 2};
  for (const int exponent : {-149, -130, -126, -120, -112, -105}) {
    Matrix a(33, 70), b(70, 33);
    a.fill([&](std::uint64_t i) { return std::ldexp(random.normal(i), exponent); });
    b.fill(
        [&](std::uint64_t i) { return std::ldexp(random.normal(9'000 + i), i % 2 == 0 ? 60 : 0); });
    expect_within_bound(a, b, false);
    expect_within_bound(a, b, true);
  }
  // What C held counts as what tiles add to.
  Matrix a(32, 32), b(32, 32), c(32, 32);
  a.fill([](auto) { return 0.0f; });
  b.fill([](auto) { return 1.0f; });
  c.fill([](std::uint64_t i) { return i % 2 == 0 ? 0x1p-127f : 0x1p-126f; });
  multiply(a, b, c, true);
  EXPECT_EQ(c(0, 0), 0);
  EXPECT_EQ(c(0, 1), 0x1p-126f);
}

// All of a number is in its parts, of the largest too, whose nearest bf16 is infinite.
TEST_P(SplitTest, AProductWithOnesIsTheNumberItself) {
  Matrix a(64, 32), one(32, 32), c(64, 32);
  one.fill([](std::uint64_t i) { return i / 32 == i % 32 ? 1.0f : 0.0f; });
  const RandomStream random{5, 3};
  a.fill([&](std::uint64_t i) {
    const std::uint32_t exponent = 24 + static_cast<std::uint32_t>(i * 40503 % 230);
    const auto word = std::bit_cast<std::uint32_t>(random.normal(i));
    return std::bit_cast<float>((word & 0x807fffffu) | exponent << 23);
  });
  a(0, 0) = kLargest, a(1, 1) = -kLargest;
  a(2, 2) = std::bit_cast<float>(0x7f7f8000u), a(3, 3) = std::bit_cast<float>(0x7f7f7fffu);
  a(4, 4) = 0x1.fffffep-103f;
  multiply(a, one, c);
  EXPECT_EQ(c.bits(), a.bits());
}

// As what is not finite ends or skips a step, none may become a number.
TEST_P(SplitTest, WhatIsNotFiniteStaysSo) {
  Matrix a(40, 70), b(70, 50), finite(40, 50), c(40, 50);
  a.fill_normal(1), b.fill_normal(2);
  multiply(a, b, finite);
  for (const std::uint32_t bits :
       {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u, 0x7f80ffffu, 0x7fbfffffu,
        0x7fff8000u, 0x7fffffffu, 0xffffffffu}) {
    const auto value = std::bit_cast<float>(bits);
    for (const bool in_a : {true, false})
      for (const std::int64_t l : {0, 17, 69}) {
        float& place = in_a ? a(33, l) : b(l, 33);
        const float before = place;
        place = value;
        multiply(a, b, c);
        place = before;
        for (std::int64_t i = 0; i < 40; ++i)
          for (std::int64_t j = 0; j < 50; ++j) {
            if ((in_a ? i : j) == 33) {
              ASSERT_TRUE(std::isnan(c(i, j))) << std::hex << bits;
            } else {
              ASSERT_EQ(c(i, j), finite(i, j));
            }
          }
      }
  }
  for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    c.fill([](auto) { return 0.0f; });
    c(20, 49) = value;
    multiply(a, b, c, true);
    EXPECT_FALSE(std::isfinite(c(20, 49)));
    EXPECT_TRUE(std::isfinite(c(20, 48)));
  }
  a(2, 3) = 3e38f, b(3, 5) = 2;
  multiply(a, b, c);
  EXPECT_FALSE(std::isfinite(c(2, 5)));
}

// Neither m, n, leading dimensions nor what lies beside it.
TEST_P(SplitTest, AnElementIsTheSameWhereverItStandsAndHoweverMuchIsAsked) {
  constexpr std::int64_t kRows = 75, kCols = 101, kDepth = 530;
  for (const auto& [ta, tb, accumulate] : kLayouts) {
    Matrix a(kRows, kDepth, ta, 2, 1), b(kDepth, kCols, tb, 1, 3);
    a.fill_normal(1), b.fill_normal(2);
    const auto run_part = [&, adds = accumulate](std::int64_t row, std::int64_t rows,
                                                 std::int64_t col, std::int64_t cols,
                                                 std::int64_t padding) {
      Matrix c(kRows, kCols, false, padding, 2);
      c.fill_normal(3);
      SplitProduct part = product_of(a, b, c, adds);
      part.a = &a(row, 0), part.b = &b(0, col), part.c = &c(row, col);
      part.m = rows, part.n = cols;
      run(part);
      for (std::int64_t i = 0; i + 1 < kRows; ++i)
        for (std::int64_t j = kCols; j < kCols + padding; ++j) EXPECT_TRUE(std::isnan(c(i, j)));
      return c.bits();
    };
    Matrix untouched(kRows, kCols);
    const std::vector<std::uint32_t> before = untouched.fill_normal(3).bits();
    const std::vector<std::uint32_t> whole = run_part(0, kRows, 0, kCols, 0);
    EXPECT_EQ(run_part(0, kRows, 0, kCols, 5), whole);
    for (const auto& [row, rows, col, cols] : std::vector<std::tuple<int, int, int, int>>{
             {0, 1, 0, 1}, {1, 33, 3, 64}, {40, 32, 1, 32}, {74, 1, 0, 101}, {0, 75, 100, 1}}) {
      const std::vector<std::uint32_t> part = run_part(row, rows, col, cols, 3);
      for (std::int64_t i = 0; i < kRows; ++i)
        for (std::int64_t j = 0; j < kCols; ++j) {
          const bool asked = i >= row && i < row + rows && j >= col && j < col + cols;
          const auto at = static_cast<std::size_t>(i * kCols + j);
          ASSERT_EQ(part[at], asked ? whole[at] : before[at]) << i << " " << j;
        }
    }
  }
}

// Two groups of strips are kept, of that operand which takes longer to pack. Neither is anything to
// bits.
TEST_P(SplitTest, BitsAreThoseOfOneColumnAtATime) {
  for (const bool transposed : {false, true}) {
    Matrix a(290, 512, transposed), b(512, 289, !transposed), c(290, 289), column(290, 289);
    a.fill_normal(1), b.fill_normal(2);
    multiply(a, b, c);
    for (const std::int64_t j : {0, 159, 160, 288}) {
      SplitProduct one = product_of(a, b, column, false);
      one.b = &b(0, j), one.c += j, one.n = 1;
      run(one);
      for (std::int64_t i = 0; i < 290; ++i) ASSERT_EQ(column(i, j), c(i, j)) << i;
    }
  }
}

TEST_P(SplitTest, ThreadsGiveTheSameBitsAgain) {
  Matrix a(70, 100), b(100, 40, true), want(70, 40);
  a.fill_normal(1), b.fill_normal(2);
  multiply(a, b, want);
  std::vector<std::vector<std::uint32_t>> got(4);
  std::vector<std::thread> threads;
  for (std::vector<std::uint32_t>& result : got)
    threads.emplace_back([&] {
      for (int i = 0; i < 3; ++i) {
        const Matrix c(70, 40);
        multiply(a, b, c);
        result = c.bits();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<std::uint32_t>& result : got) EXPECT_EQ(result, want.bits());
}

// What is trapped adds as Intel's manual writes. For a CPU the test says whether it does: the bound
// holds for it either way if it does not fail above.
TEST_P(SplitTest, BitsAreThoseOfPortableTilesIfTheCpuAddsAsItsManualWrites) {
  Matrix a(64, 160), b(160, 64), c(64, 64), portable(64, 64);
  a.fill_normal(1), b.fill_normal(2);
  multiply(a, b, c);
  const SplitProduct product = product_of(a, b, portable, false);
  std::vector<std::byte> scratch(static_cast<std::size_t>(product.scratch_nbytes()));
  product.run_portably(scratch.data());
  std::cout << GetParam() << ": bits are " << (c.bits() == portable.bits() ? "" : "not ")
            << "those of portable tiles" << std::endl;
  if (GetParam() != "amx") {
    EXPECT_EQ(c.bits(), portable.bits());
  }
}

INSTANTIATE_TEST_SUITE_P(Tiles, SplitTest, ::testing::ValuesIn(tiles_here()),
                         [](const auto& test) { return test.param; });

#if defined(__x86_64__)

// A library's tiles around ours: their shape is there again, and nothing in them.
TEST(AmxTilesTest, HaveTheShapeThatTheyHadBefore) {
  std::array<float, 256> ones, stored;
  ones.fill(1);
  AmxTiles around;
  around.load<3>(ones.data(), 64);
  {
    AmxTiles within;
    within.zero<0>();
  }
  around.store<3>(stored.data(), 64);
  EXPECT_EQ(stored, (std::array<float, 256>{}));
  around.load<3>(ones.data(), 64);
  around.store<3>(stored.data(), 64);
  EXPECT_EQ(stored, ones);
}

#endif

SplitProduct of_shape(std::int64_t m, std::int64_t n, std::int64_t k, bool transposed = false) {
  SplitProduct product{};
  product.m = m, product.n = n, product.k = k;
  product.a_transposed = transposed, product.b_transposed = !transposed;
  return product;
}

TEST(SplitProductTest, ScratchIsAtMostOneMebibyte) {
  for (const std::int64_t m : {1, 64, 384, 1024, 50'257})
    for (const std::int64_t n : {1, 64, 384, 1536, 50'257})
      for (const std::int64_t k : {1, 64, 384, 513, 1024, 50'257})
        for (const bool transposed : {false, true}) {
          EXPECT_GT(of_shape(m, n, k, transposed).scratch_nbytes(), 0);
          EXPECT_LE(of_shape(m, n, k, transposed).scratch_nbytes(), 1 << 20);
        }
}

TEST(SplitProductTest, SuitsWhereEverySideIsLongEnough) {
  EXPECT_TRUE(of_shape(64, 64, 64).suits());
  EXPECT_FALSE(of_shape(63, 640, 640).suits());
  EXPECT_FALSE(of_shape(640, 1, 640).suits());
  EXPECT_FALSE(of_shape(640, 640, 63).suits());
}

TEST(SplitProductTest, TilesAreRefusedBelowTheirLevel) {
  if (isa() < Isa::kV4Amx) {
    EXPECT_THROW(request_amx(), InvalidArgument);
  } else {
    request_amx();
    request_amx();  // as often as one likes
  }
}

}  // namespace
}  // namespace tessera::engine
