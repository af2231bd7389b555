// Products of pairs of bf16: where each element goes, values against double precision, bits.
#include "engine/gemm/pairs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/cpu_choice.h"
#include "engine/gemm/gemm.h"
#include "engine/isa.h"
#include "engine/philox.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/machine/environment.h"

namespace tessera::engine {
namespace {

using Index = std::int64_t;

// rows x width elements, `ld` apart, each of other bits; NaN after each row.
std::vector<BFloat16> matrix_of(Index rows, Index width, Index ld) {
  std::vector<BFloat16> x(static_cast<std::size_t>(rows * ld), BFloat16::from_float(NAN));
  for (Index r = 0; r < rows; ++r)
    for (Index j = 0; j < width; ++j)
      x[static_cast<std::size_t>(r * ld + j)].bits = static_cast<std::uint16_t>(r * width + j + 1);
  return x;
}

Pair pair_of(const std::vector<BFloat16>& x, Index low, Index high) {
  const auto bits = [&](Index i) {
    return i < 0 ? Pair{0} : static_cast<Pair>(x[static_cast<std::size_t>(i)].bits);
  };
  return bits(low) | bits(high) << 16;
}

constexpr Pair kUntouched = 0xABCDABCD;

TEST(PairsTest, LayoutsHoldEveryElementAndZeros) {
  for (const Index rows : {1, 2, 7, 16, 17, 32, 35}) {
    for (const Index width : {1, 2, 13, 16, 31, 32, 33, 64, 70}) {
      const Index ld = width + 3, depth = (width + 1) / 2;
      const std::vector<BFloat16> x = matrix_of(rows, width, ld);
      const auto index = [&](Index r, Index j) { return r < rows && j < width ? r * ld + j : -1; };

      const Index cols = (width + 15) / 16 * 16, num_rows = (rows + 1) / 2;
      std::vector<Pair> y(static_cast<std::size_t>(num_rows * cols + 1), kUntouched);
      pair_rows(y.data(), cols, x.data(), rows, width, ld);
      for (Index i = 0; i < num_rows; ++i)
        for (Index j = 0; j < cols; ++j)
          ASSERT_EQ(y[static_cast<std::size_t>(i * cols + j)],
                    pair_of(x, index(2 * i, j), index(2 * i + 1, j)))
              << rows << " x " << width << " at " << i << ", " << j;
      EXPECT_EQ(y.back(), kUntouched);

      y.assign(static_cast<std::size_t>(rows * (depth + 1) + 1), kUntouched);
      pair_cols(y.data(), depth + 1, x.data(), rows, width, ld);
      for (Index r = 0; r < rows; ++r)
        for (Index i = 0; i <= depth; ++i)
          ASSERT_EQ(y[static_cast<std::size_t>(r * (depth + 1) + i)],
                    pair_of(x, index(r, 2 * i), index(r, 2 * i + 1)))
              << rows << " x " << width << " at " << r << ", " << i;
      EXPECT_EQ(y.back(), kUntouched);

      const Index lanes = (rows + 31) / 32 * 32;
      y.assign(static_cast<std::size_t>(depth * lanes + 1), kUntouched);
      pair_cols_transposed(y.data(), lanes, x.data(), rows, width, ld);
      for (Index i = 0; i < depth; ++i)
        for (Index r = 0; r < lanes; ++r)
          ASSERT_EQ(y[static_cast<std::size_t>(i * lanes + r)],
                    pair_of(x, index(r, 2 * i), index(r, 2 * i + 1)))
              << rows << " x " << width << " at " << i << ", " << r;
      EXPECT_EQ(y.back(), kUntouched);
    }
  }
}

TEST(PairsTest, AreMultipliedOnCpusThatHaveThem) {
  const auto asked = tools::CpuWishes::of(tools::environment()).choice().gemm;
  const bool insists = asked == CpuGemm::kOneDnn || asked == CpuGemm::kEigen;
  EXPECT_EQ(multiplies_pairs(), isa() == Isa::kV4Bf16 && !insists);
}

// Nobody is told to use on a CPU what it does not have: then there is nothing to run.
bool can_run() {
  const bool has_instructions = isa() >= Isa::kV4Bf16;
  if (!has_instructions) {
    EXPECT_FALSE(multiplies_pairs());
  }
  return has_instructions;
}

// A (m, 2 pairs) and B (2 pairs, n) in pairs, their values, and C.
struct Operands {
  Operands(Index m, Index n, Index pairs, bool transposed, Index padding) {
    const RandomStream random{3, 1};
    lda = (transposed ? m : pairs) + padding;
    ldb = n + padding;
    ldc = n + padding;
    a.resize(static_cast<std::size_t>((transposed ? pairs : m) * lda), kUntouched);
    b.resize(static_cast<std::size_t>(pairs * ldb), kUntouched);
    c.resize(static_cast<std::size_t>(m * ldc), 7.0f);
    // An element depends on its place alone, so that smaller products are parts of larger ones.
    const auto value = [&](Index row, Index col, std::uint64_t of) {
      return BFloat16::from_float(
          random.normal(static_cast<std::uint64_t>(row * 4096 + col) * 2 + of));
    };
    const auto pair = [&](BFloat16 low, BFloat16 high) {
      return static_cast<Pair>(low.bits) | static_cast<Pair>(high.bits) << 16;
    };
    for (Index r = 0; r < m; ++r)
      for (Index i = 0; i < pairs; ++i)
        a[static_cast<std::size_t>(transposed ? i * lda + r : r * lda + i)] =
            pair(value(r, 2 * i, 0), value(r, 2 * i + 1, 0));
    for (Index i = 0; i < pairs; ++i)
      for (Index j = 0; j < n; ++j)
        b[static_cast<std::size_t>(i * ldb + j)] = pair(value(2 * i, j, 1), value(2 * i + 1, j, 1));
    product = {a.data(), b.data(), c.data(), lda, ldb, ldc, m, n, pairs, transposed, false};
  }
  static double part(Pair p, int half) {
    return BFloat16{static_cast<std::uint16_t>(p >> (16 * half))}.to_float();
  }
  double want(Index r, Index j, double* sum_of_sizes) const {
    double sum = 0;
    for (Index i = 0; i < product.num_pairs; ++i)
      for (int half = 0; half < 2; ++half) {
        const Pair x =
            a[static_cast<std::size_t>(product.a_transposed ? i * lda + r : r * lda + i)];
        const double term = part(x, half) * part(b[static_cast<std::size_t>(i * ldb + j)], half);
        sum += term;
        *sum_of_sizes += std::fabs(term);
      }
    return sum;
  }

  Index lda, ldb, ldc;
  std::vector<Pair> a, b;
  std::vector<float> c;
  PairProduct product;
};

TEST(PairProductTest, EqualsDoublePrecision) {
  if (!can_run()) return;
  for (const Index m : {1, 2, 5, 6, 7, 24, 47}) {
    for (const Index n : {16, 32, 48, 64, 80, 112, 256}) {
      for (const Index pairs : {1, 3, 32, 128}) {
        for (const bool transposed : {false, true}) {
          for (const bool accumulate : {false, true}) {
            Operands x(m, n, pairs, transposed, 5);
            x.product.accumulate = accumulate;
            x.product.run();
            for (Index r = 0; r < m; ++r)
              for (Index j = 0; j < x.ldc; ++j) {
                const float got = x.c[static_cast<std::size_t>(r * x.ldc + j)];
                if (j >= n) {
                  ASSERT_EQ(got, 7.0f) << "beyond a row";
                  continue;
                }
                double sizes = accumulate ? 7 : 0;
                const double want = x.want(r, j, &sizes) + (accumulate ? 7 : 0);
                // Each of the sums of 2 pairs + 1 terms is rounded.
                ASSERT_NEAR(got, want, sizes * static_cast<double>(2 * pairs + 1) * 0x1p-24)
                    << m << " x " << n << " x " << 2 * pairs << " at " << r << ", " << j;
              }
          }
        }
      }
    }
  }
}

TEST(PairProductTest, AnElementDependsOnItsRowAndColumnAlone) {
  if (!can_run()) return;
  Operands whole(47, 256, 33, false, 0);
  whole.product.run();
  for (const Index m : {1, 6, 8, 47}) {
    for (const Index n : {16, 48, 96, 256}) {
      for (const bool transposed : {false, true}) {
        Operands part(m, n, 33, transposed, 11);
        part.product.run();
        for (Index r = 0; r < m; ++r)
          for (Index j = 0; j < n; ++j)
            ASSERT_EQ(part.c[static_cast<std::size_t>(r * part.ldc + j)],
                      whole.c[static_cast<std::size_t>(r * whole.ldc + j)])
                << m << " x " << n << " at " << r << ", " << j;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::engine
