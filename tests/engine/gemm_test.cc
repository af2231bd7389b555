// Matrix products: values against a naive reference, empty shapes, bits independent of alignment,
// leading dimension and concurrency, bf16 rounding.
#include "engine/gemm/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/cpu_choice.h"
#include "engine/gemm/direct.h"
#include "engine/gemm/vector_product.h"
#include "engine/isa.h"
#include "engine/philox.h"
#include "tests/testing/sanitizers.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/machine/environment.h"

namespace tessera::engine {
namespace {

// Stored elements of a view at some offset from alignment and with some padding after each row;
// padding is NaN so that reading it would show.
template <class T>
class Storage {
 public:
  Storage(std::int64_t rows, std::int64_t cols, bool transposed, std::uint64_t stream,
          std::int64_t offset = 0, std::int64_t padding = 0) {
    const std::int64_t r = transposed ? cols : rows, c = transposed ? rows : cols;
    const std::int64_t ld = c + padding;
    elements_.resize(static_cast<std::size_t>(offset + r * ld) + 64 / sizeof(T));
    for (T& e : elements_) store_f32(e, NAN);
    // From a 64-byte boundary, so that `offset` is the misalignment in elements.
    const auto address = reinterpret_cast<std::uintptr_t>(elements_.data());
    const auto skip = static_cast<std::int64_t>((64 - address % 64) % 64 / sizeof(T));
    T* data = elements_.data() + skip + offset;
    const RandomStream random{1, stream};
    for (std::int64_t i = 0; i < r; ++i)
      for (std::int64_t j = 0; j < c; ++j)
        store_f32(data[i * ld + j], random.normal(static_cast<std::uint64_t>(i * c + j)));
    view = {data, rows, cols, ld, transposed};
  }
  MatrixView<T> view;

 private:
  std::vector<T> elements_;
};

template <class T>
float at(const MatrixView<T>& m, std::int64_t i, std::int64_t j) {
  return to_f32(m.transposed ? m.data[j * m.ld + i] : m.data[i * m.ld + j]);
}

template <class T>
std::vector<float> values(const MatrixView<T>& m) {
  std::vector<float> v;
  for (std::int64_t i = 0; i < m.rows; ++i)
    for (std::int64_t j = 0; j < m.cols; ++j) v.push_back(at(m, i, j));
  return v;
}

template <class A, class B, class C>
std::vector<double> naive(const MatrixView<A>& a, const MatrixView<B>& b, const MatrixView<C>& c,
                          bool accumulate) {
  std::vector<double> out;
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t j = 0; j < b.cols; ++j) {
      double sum = accumulate ? at(c, i, j) : 0;
      for (std::int64_t k = 0; k < a.cols; ++k)
        sum += static_cast<double>(at(a, i, k)) * at(b, k, j);
      out.push_back(sum);
    }
  return out;
}

struct Mix {
  Memory memory{{.poison = true}};
  Products products{Stream::inline_cpu("compute")};

  // With as much scratch as it asks for, and not a byte more written.
  template <class A, class B, class C>
  void run(const Product<A, B, C>& product) {
    constexpr std::int64_t kGuard = 256;
    const std::int64_t nbytes = product.scratch_nbytes(products);
    const Tensor scratch = gemm_scratch(memory, nbytes + kGuard);
    std::byte* const guard = scratch.raw() + nbytes;
    std::fill_n(guard, kGuard, std::byte{0x7b});
    product.run(products, scratch);
    EXPECT_EQ(std::count(guard, guard + kGuard, std::byte{0x7b}), kGuard);
  }

  template <class A, class B, class C>
  void check(std::int64_t m, std::int64_t n, std::int64_t k) {
    for (const bool ta : {false, true})
      for (const bool tb : {false, true})
        for (const bool tc : {false, true})
          for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(::testing::Message()
                         << m << " " << n << " " << k << " " << ta << tb << tc << accumulate);
            const Storage<A> a(m, k, ta, 1, 1, 3);
            const Storage<B> b(k, n, tb, 2, 2, 1);
            Storage<C> c(m, n, tc, 3, 3, 5);
            const std::vector<double> want = naive(a.view, b.view, c.view, accumulate);
            run(Product<A, B, C>{a.view, b.view, c.view, accumulate});
            const std::vector<float> got = values(c.view);
            const double rounding = std::is_same_v<C, float> ? 0 : 0x1p-8;
            for (std::size_t i = 0; i < want.size(); ++i)
              ASSERT_NEAR(got[i], want[i],
                          rounding * std::abs(want[i]) + 1e-6 * std::sqrt(k + 1.0) * 4);
          }
  }
};

TEST(Gemm, EqualsTheNaiveProductForEveryMixLayoutAndAwkwardShape) {
  Mix mix;
  for (const auto& [m, n, k] : std::vector<std::tuple<int, int, int>>{{1, 1, 1},
                                                                      {1, 7, 13},
                                                                      {7, 1, 13},
                                                                      {13, 31, 1},
                                                                      {33, 3, 40},
                                                                      {23, 127, 65},
                                                                      {97, 70, 40},
                                                                      {17, 65, 601},
                                                                      {65, 33, 64}}) {
    if (testing::kUnderTsan && m * n * k > 50'000) continue;  // no race is in the size
    mix.check<float, float, float>(m, n, k);
    mix.check<float, float, BFloat16>(m, n, k);
    mix.check<float, BFloat16, float>(m, n, k);
    mix.check<float, BFloat16, BFloat16>(m, n, k);
    mix.check<BFloat16, float, float>(m, n, k);
    mix.check<BFloat16, float, BFloat16>(m, n, k);
    mix.check<BFloat16, BFloat16, float>(m, n, k);
    mix.check<BFloat16, BFloat16, BFloat16>(m, n, k);
  }
}

// With sides that are split, where that is who multiplies, and too many elements of B not to be.
TEST(Gemm, EqualsTheNaiveProductForLargeMixes) {
  Mix mix;
  mix.check<float, float, float>(66, 200, 170);
  mix.check<float, float, BFloat16>(66, 200, 170);
  mix.check<float, BFloat16, float>(66, 200, 170);
  mix.check<BFloat16, BFloat16, BFloat16>(66, 200, 170);
}

TEST(Gemm, EqualsTheNaiveProductOverSeveralBlocksInEveryDirection) {
  const Storage<float> a(1030, 260, false, 1), b(260, 200, false, 2), c(1030, 200, false, 3);
  const std::vector<double> want = naive(a.view, b.view, c.view, false);
  gemm(a.view, b.view, c.view, false);
  const std::vector<float> got = values(c.view);
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-4);
}

TEST(Gemm, EmptyDimensions) {
  Mix mix;
  for (const auto& [m, n, k] :
       std::vector<std::tuple<int, int, int>>{{0, 3, 4}, {3, 0, 4}, {3, 4, 0}, {0, 0, 0}}) {
    mix.check<float, float, float>(m, n, k);
    mix.check<BFloat16, BFloat16, BFloat16>(m, n, k);
  }
}

void expect_same_bits_wherever_it_lies(std::int64_t m, std::int64_t n, std::int64_t k, bool ta,
                                       bool tb, bool accumulate) {
  const Storage<float> a(m, k, ta, 1), b(k, n, tb, 2), c(m, n, false, 3);
  gemm(a.view, b.view, c.view, accumulate);
  const std::vector<float> want = values(c.view);
  for (const std::int64_t offset : {1, 3, 6}) {
    const Storage<float> a2(m, k, ta, 1, offset, 1), b2(k, n, tb, 2, (offset * 5) % 16, 2);
    const Storage<float> c2(m, n, false, 3, (offset * 3) % 16, offset);
    gemm(a2.view, b2.view, c2.view, accumulate);
    ASSERT_EQ(values(c2.view), want) << m << " " << n << " " << k << " +" << offset;
  }
}

TEST(Gemm, BitsDoNotDependOnAlignmentOrLeadingDimension) {
  for (int m = 1; m <= 40; m += testing::kIsSlow ? 5 : 1)
    for (int n = 1; n <= 40; n += 1 + n % 3)
      for (const int k : {1, 2, 5, 7, 19, 40}) {
        expect_same_bits_wherever_it_lies(m, n, k, (m + n) % 2 == 0, (n + k) % 2 == 0, false);
        if (HasFatalFailure()) return;
      }
}

// As large as for the library, where there is one. Slightly other leading dimensions change
// nothing.
TEST(Gemm, BitsOfLargeProductsDoNotDependOnAlignmentOrPadding) {
  for (const auto& [m, n, k] : std::vector<std::tuple<int, int, int>>{{1, 300, 700},
                                                                      {300, 1, 700},
                                                                      {4, 70, 300},
                                                                      {33, 64, 64},
                                                                      {70, 4, 700},
                                                                      {100, 130, 257},
                                                                      {256, 64, 32},
                                                                      {31, 500, 90}})
    for (const bool ta : {false, true})
      for (const bool tb : {false, true}) {
        expect_same_bits_wherever_it_lies(m, n, k, ta, tb, true);
        if (HasFatalFailure()) return;
      }
}

// Each step gives tensors other addresses.
TEST(Gemm, BitsOfBf16ProductsDoNotDependOnAlignment) {
  Mix mix;
  const auto check = [&]<class C>(C) {
    for (const auto& [m, n, k] : std::vector<std::tuple<int, int, int>>{
             {4, 70, 300}, {64, 64, 64}, {70, 5, 700}, {100, 130, 257}, {256, 64, 32}})
      for (const bool ta : {false, true})
        for (const bool tb : {false, true}) {
          std::vector<float> want;
          for (const std::int64_t offset : {0, 1, 3, 6}) {
            const Storage<BFloat16> a(m, k, ta, 1, offset), b(k, n, tb, 2, (offset * 5) % 16);
            const Storage<C> c(m, n, false, 3, (offset * 3) % 16);
            gemm(mix.products, mix.memory, MatrixView<const BFloat16>(a.view),
                 MatrixView<const BFloat16>(b.view), c.view, true);
            if (offset == 0) want = values(c.view);
            ASSERT_EQ(values(c.view), want) << m << " " << n << " " << k << " +" << offset;
          }
        }
  };
  check(float{});
  check(BFloat16{});
}

// Sums are f32: of numbers that bf16 holds, as far apart as bf16 sums would lose.
TEST(Gemm, SumsOfBf16ProductsAreF32) {
  Mix mix;
  const Storage<BFloat16> a(40, 512, false, 1), b(512, 40, false, 2), c16(40, 40, false, 3);
  const Storage<float> c(40, 40, false, 3);
  std::fill_n(a.view.data, 40 * 512, BFloat16::from_float(1.0f / 256));
  std::fill_n(b.view.data, 512 * 40, BFloat16::from_float(1.0f));
  const MatrixView<const BFloat16> x = a.view, y = b.view;
  std::fill_n(c.view.data, 40 * 40, 256.0f);
  gemm(mix.products, mix.memory, x, y, c.view, true);
  for (const float v : values(c.view)) EXPECT_EQ(v, 258);
  std::fill_n(c16.view.data, 40 * 40, BFloat16::from_float(256));
  gemm(mix.products, mix.memory, x, y, c16.view, true);
  for (const float v : values(c16.view)) EXPECT_EQ(v, 258);
}

TEST(Gemm, ABiasIsAddedToEachRow) {
  Mix mix;
  const auto check = [&]<class T, class C>(T, C) {
    for (const auto& [m, n, k] :
         std::vector<std::tuple<int, int, int>>{{5, 7, 9}, {70, 90, 110}, {3, 2, 0}}) {
      const Storage<T> a(m, k, false, 1), b(k, n, true, 2), bias(1, n, false, 4);
      const Storage<C> c(m, n, false, 3, 0, 3);
      std::vector<double> want = naive(a.view, b.view, c.view, false);
      for (std::size_t i = 0; i < want.size(); ++i)
        want[i] += at(bias.view, 0, static_cast<std::int64_t>(i) % n);
      mix.run(Product<T, T, C>{a.view, b.view, c.view, false, bias.view.data});
      const std::vector<float> got = values(c.view);
      const double rounding = std::is_same_v<C, float> ? 0 : 0x1p-8;
      for (std::size_t i = 0; i < want.size(); ++i)
        ASSERT_NEAR(got[i], want[i], rounding * std::abs(want[i]) + 1e-6 * std::sqrt(k + 1.0) * 4);
      EXPECT_THROW(gemm(mix.products, mix.memory, MatrixView<const T>(a.view),
                        MatrixView<const T>(b.view), c.view, true, bias.view.data),
                   InvalidArgument);
    }
  };
  check(float{}, float{});
  check(float{}, BFloat16{});
  check(BFloat16{}, float{});
  check(BFloat16{}, BFloat16{});
}

TEST(Gemm, LeavesThePaddingOfCAlone) {
  const Storage<float> a(5, 4, false, 1), b(4, 6, false, 2);
  const Storage<float> c(5, 6, false, 3, 0, 2);
  gemm(a.view, b.view, c.view, false);
  for (int i = 0; i < 5; ++i)
    for (int j = 6; j < 8; ++j) EXPECT_TRUE(std::isnan(c.view.data[i * c.view.ld + j]));
}

template <class T>
void expect_nan_alone_gives_nan(std::int64_t m, std::int64_t n, std::int64_t k) {
  Mix mix;
  const Storage<T> a(m, k, false, 1), b(k, n, false, 2);
  const Storage<float> c(m, n, false, 3);
  const MatrixView<const T> x = a.view, y = b.view;
  std::fill_n(c.view.data, m * n, NAN);
  gemm(mix.products, mix.memory, x, y, c.view, false);
  for (const float v : values(c.view)) EXPECT_FALSE(std::isnan(v));
  store_f32(a.view.data[4 * k], NAN);
  gemm(mix.products, mix.memory, x, y, c.view, false);
  for (std::int64_t j = 0; j < n; ++j) {
    EXPECT_TRUE(std::isnan(at(c.view, 4, j)));
    EXPECT_FALSE(std::isnan(at(c.view, 3, j)));
  }
}

TEST(Gemm, PropagatesNanAndDoesNotReadOldCWhenAssigning) {
  for (const auto& [m, n, k] : {std::tuple{9, 7, 8}, {90, 70, 80}}) {
    expect_nan_alone_gives_nan<float>(m, n, k);
    expect_nan_alone_gives_nan<BFloat16>(m, n, k);
  }
}

TEST(Gemm, ConcurrentCallsGiveTheSameBits) {
  const Storage<float> a(129, 300, false, 1), b(300, 65, true, 2);
  const Storage<float> want(129, 65, false, 3);
  gemm(a.view, b.view, want.view, false);
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> got(4);
  for (std::vector<float>& result : got) {
    threads.emplace_back([&] {
      const Storage<float> c(129, 65, false, 3);
      for (int i = 0; i < 5; ++i) gemm(a.view, b.view, c.view, false);
      result = values(c.view);
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::vector<float>& result : got) EXPECT_EQ(result, values(want.view));
}

TEST(Gemm, WorkspaceIsCountedAndGivenBack) {
  const Memory memory;
  Products products(Stream::inline_cpu("compute"));
  const Storage<float> a(8, 16, false, 1);  // beside which bf16 is widened on every CPU
  const Storage<BFloat16> b(16, 4, false, 2), c(8, 4, false, 3);
  gemm(products, memory, MatrixView<const float>(a.view), MatrixView<const BFloat16>(b.view),
       c.view, false);
  const MemoryStats stats = memory.stats();
  EXPECT_EQ(stats.peak_nbytes[static_cast<std::size_t>(Category::kWorkspace)],
            4 * (16 * 4 + 8 * 4));
  EXPECT_EQ(stats.total_nbytes, 0);
}

TEST(Gemm, WhatIsSplitHasScratch) {
  if (!splits_f32()) {
    std::cout << "f32 is not split: " << gemm_library() << std::endl;
  }
  const Memory memory;
  Products products(Stream::inline_cpu("compute"));
  const Storage<float> a(70, 170, false, 1), b(170, 200, false, 2), c(70, 200, false, 3);
  const MatrixView<const float> x = a.view, y = b.view;
  const std::int64_t nbytes = gemm_scratch_nbytes(products, x, y, c.view, false);
  EXPECT_EQ(nbytes > 0, splits_f32());
  EXPECT_LE(nbytes, 1 << 20);
  gemm(products, memory, x, y, c.view, false);
  EXPECT_EQ(memory.stats().peak_nbytes[static_cast<std::size_t>(Category::kWorkspace)], nbytes);
  EXPECT_EQ(memory.stats().total_nbytes, 0);
  const std::vector<float> split = values(c.view);
  gemm(x, y, c.view, false);  // which never is
  EXPECT_EQ(values(c.view) != split, splits_f32());
  if (!splits_f32()) return;
  EXPECT_THROW(gemm(products, nullptr, x, y, c.view, false), InvalidArgument);
  const Storage<float> small(66, 66, false, 2), d(70, 66, false, 3);
  const MatrixView<const float> z{a.view.data, 70, 66, a.view.ld};
  EXPECT_EQ(
      gemm_scratch_nbytes(products, z, MatrixView<const float>(small.view), d.view, false) > 0,
      isa() < Isa::kV4)
      << "with AVX-512 B is multiplied where it lies";
}

TEST(Gemm, RefusesShapesThatDoNotFit) {
  const Storage<float> a(5, 4, false, 1), b(4, 6, false, 2), c(5, 6, false, 3);
  EXPECT_THROW(gemm(a.view, b.view.t(), c.view, false), InvalidArgument);
  EXPECT_THROW(gemm(a.view, b.view, c.view.t(), false), InvalidArgument);
  MatrixView<float> narrow = c.view;
  narrow.ld = 5;
  EXPECT_THROW(gemm(a.view, b.view, narrow, false), InvalidArgument);
  const Memory memory;
  const Tensor t = Tensor::zeros(memory, {2, 3}, DType::kF32);
  EXPECT_THROW(matrix<float>(t, 2, 2), InvalidArgument);
  EXPECT_THROW(matrix<const BFloat16>(t, 2, 3), InvalidArgument);
}

// On every machine, whoever multiplies there.
TEST(DirectProduct, AnElementIsTheSameWhereverItStandsAndHoweverMuchIsAsked) {
  constexpr std::int64_t kRows = 15, kCols = 119, kDepth = 37;  // each size of block and a rest
  for (const auto& [ta, tb, accumulate] : std::vector<std::tuple<bool, bool, bool>>{
           {false, false, false},
           {false, true, true},
           {true, false, true},
           {true, true, false},
       }) {
    const Storage<float> a(kRows, kDepth, ta, 1, 1, 2), b(kDepth, kCols, tb, 2, 3, 1);
    const auto run = [&, ta = ta, tb = tb, adds = accumulate](std::int64_t row, std::int64_t rows,
                                                              std::int64_t col, std::int64_t cols) {
      const Storage<float> c(kRows, kCols, false, 3, 2, 5);
      DirectProduct{.a = a.view.data + row * (ta ? 1 : a.view.ld),
                    .b = b.view.data + col * (tb ? b.view.ld : 1),
                    .c = c.view.data + row * c.view.ld + col,
                    .lda = a.view.ld,
                    .ldb = b.view.ld,
                    .ldc = c.view.ld,
                    .m = rows,
                    .n = cols,
                    .k = kDepth,
                    .a_transposed = ta,
                    .b_transposed = tb,
                    .accumulate = adds}
          .run();
      return values(c.view);
    };
    const Storage<float> before(kRows, kCols, false, 3);
    const std::vector<float> untouched = values(before.view);
    const std::vector<double> want = naive(a.view, b.view, before.view, accumulate);
    const std::vector<float> whole = run(0, kRows, 0, kCols);
    for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(whole[i], want[i], 1e-4);
    for (const auto& [row, rows, col, cols] :
         std::vector<std::tuple<int, int, int, int>>{{0, 1, 0, 1},
                                                     {1, 2, 3, 4},
                                                     {2, 6, 1, 16},
                                                     {3, 7, 5, 37},
                                                     {4, 11, 20, 99},
                                                     {14, 1, 118, 1}}) {
      const std::vector<float> part = run(row, rows, col, cols);
      for (std::int64_t i = 0; i < kRows; ++i)
        for (std::int64_t j = 0; j < kCols; ++j) {
          const bool asked = i >= row && i < row + rows && j >= col && j < col + cols;
          const auto at = static_cast<std::size_t>(i * kCols + j);
          ASSERT_EQ(part[at], asked ? whole[at] : untouched[at]) << i << " " << j;
        }
    }
  }
}

// Whole vectors and rests of each kind, alone and several at a time.
TEST(VectorProduct, AnElementIsTheSameWhereverItStands) {
  for (const std::int64_t k : {1, 15, 16, 31, 32, 33, 48, 50, 100, 1025})
    for (const bool transposed : {false, true})
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(::testing::Message() << k << " " << transposed << accumulate);
        constexpr std::int64_t kCols = 39;
        const Storage<float> x(1, k, false, 1, 3), b(k, kCols, transposed, 2, 1, 2);
        const auto run = [&](std::int64_t col, std::int64_t cols) {
          const Storage<float> y(1, kCols, false, 3, 5, 1);
          VectorProduct{.x = x.view.data,
                        .b = b.view.data + col * (transposed ? b.view.ld : 1),
                        .y = y.view.data + col,
                        .ldb = b.view.ld,
                        .n = cols,
                        .k = k,
                        .b_transposed = transposed,
                        .accumulate = accumulate}
              .run();
          return values(y.view);
        };
        const Storage<float> before(1, kCols, false, 3);
        const std::vector<float> untouched = values(before.view);
        const std::vector<double> want = naive(x.view, b.view, before.view, accumulate);
        const std::vector<float> whole = run(0, kCols);
        for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(whole[i], want[i], 1e-4);
        for (const auto& [col, cols] : std::vector<std::pair<int, int>>{{0, 1}, {3, 7}, {5, 34}}) {
          const std::vector<float> part = run(col, cols);
          for (std::int64_t j = 0; j < kCols; ++j) {
            const bool asked = j >= col && j < col + cols;
            const auto at = static_cast<std::size_t>(j);
            ASSERT_EQ(part[at], asked ? whole[at] : untouched[at]) << j;
          }
        }
      }
}

// As of every test: without it .ci/run cpus would test the same library several times.
TEST(Gemm, IsByWhomTheEnvironmentAsksFor) {
  const auto asked = tools::CpuWishes::of(tools::environment()).choice();
  if (asked.gemm == CpuGemm::kEigen) {
    EXPECT_TRUE(gemm_library().starts_with("Eigen"));
  }
  if (asked.gemm == CpuGemm::kOneDnn) {
    EXPECT_TRUE(gemm_library().starts_with("oneDNN"));
  }
  EXPECT_EQ(splits_f32(), asked.gemm == CpuGemm::kSplit || asked.gemm == CpuGemm::kSplitPortable);
  EXPECT_EQ(threads_per_product(), asked.threads_per_product.value_or(1));
}

TEST(Gemm, CountsFlops) { EXPECT_EQ(gemm_flops(2, 3, 5), 60); }

}  // namespace
}  // namespace tessera::engine
