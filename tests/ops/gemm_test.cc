// Matrix products: values against a naive reference, empty shapes, bits independent of alignment,
// leading dimension and concurrency, bf16 rounding.
#include "ops/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/philox.h"

namespace tessera::ops {
namespace {

using engine::BFloat16;
using engine::to_f32;

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
    for (T& e : elements_) engine::store_f32(e, NAN);
    // From a 64-byte boundary, so that `offset` is the misalignment in elements.
    const auto address = reinterpret_cast<std::uintptr_t>(elements_.data());
    const auto skip = static_cast<std::int64_t>((64 - address % 64) % 64 / sizeof(T));
    T* data = elements_.data() + skip + offset;
    const engine::RandomStream random{1, stream};
    for (std::int64_t i = 0; i < r; ++i)
      for (std::int64_t j = 0; j < c; ++j)
        engine::store_f32(data[i * ld + j], random.normal(static_cast<std::uint64_t>(i * c + j)));
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
  engine::Memory memory{{.poison = true}};

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
            gemm(memory, MatrixView<const A>(a.view), MatrixView<const B>(b.view), c.view,
                 accumulate);
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
  for (const auto& [m, n, k] : std::vector<std::tuple<int, int, int>>{
           {1, 1, 1}, {1, 7, 13}, {7, 1, 13}, {13, 31, 1}, {33, 3, 40}, {17, 65, 600}}) {
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

TEST(Gemm, BitsDoNotDependOnAlignmentOrLeadingDimension) {
  for (int m = 1; m <= 40; ++m)
    for (int n = 1; n <= 40; n += 1 + n % 3)
      for (const int k : {1, 2, 5, 7, 19, 40}) {
        const bool ta = (m + n) % 2 == 0, tb = (n + k) % 2 == 0;
        const Storage<float> a(m, k, ta, 1), b(k, n, tb, 2);
        const Storage<float> c(m, n, false, 3);
        gemm(a.view, b.view, c.view, false);
        const std::vector<float> want = values(c.view);
        for (const std::int64_t offset : {1, 3, 6}) {
          const Storage<float> a2(m, k, ta, 1, offset, 1), b2(k, n, tb, 2, (offset * 5) % 16, 2);
          const Storage<float> c2(m, n, false, 3, (offset * 3) % 16, offset);
          gemm(a2.view, b2.view, c2.view, false);
          ASSERT_EQ(values(c2.view), want) << m << " " << n << " " << k << " +" << offset;
        }
      }
}

TEST(Gemm, LeavesThePaddingOfCAlone) {
  const Storage<float> a(5, 4, false, 1), b(4, 6, false, 2);
  const Storage<float> c(5, 6, false, 3, 0, 2);
  gemm(a.view, b.view, c.view, false);
  for (int i = 0; i < 5; ++i)
    for (int j = 6; j < 8; ++j) EXPECT_TRUE(std::isnan(c.view.data[i * c.view.ld + j]));
}

TEST(Gemm, PropagatesNanAndDoesNotReadOldCWhenAssigning) {
  Storage<float> a(9, 8, false, 1);
  const Storage<float> b(8, 7, false, 2), c(9, 7, false, 3);
  std::fill_n(c.view.data, 63, NAN);
  gemm(a.view, b.view, c.view, false);
  for (const float v : values(c.view)) EXPECT_FALSE(std::isnan(v));
  a.view.data[4 * 8] = NAN;
  gemm(a.view, b.view, c.view, false);
  for (int j = 0; j < 7; ++j) {
    EXPECT_TRUE(std::isnan(at(c.view, 4, j)));
    EXPECT_FALSE(std::isnan(at(c.view, 3, j)));
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
  const engine::Memory memory;
  const Storage<BFloat16> a(8, 16, false, 1), b(16, 4, false, 2), c(8, 4, false, 3);
  gemm(memory, MatrixView<const BFloat16>(a.view), MatrixView<const BFloat16>(b.view), c.view,
       false);
  const engine::MemoryStats stats = memory.stats();
  EXPECT_EQ(stats.peak_nbytes[static_cast<std::size_t>(engine::Category::kWorkspace)],
            4 * (8 * 16 + 16 * 4 + 8 * 4));
  EXPECT_EQ(stats.total_nbytes, 0);
}

TEST(Gemm, RefusesShapesThatDoNotFit) {
  const Storage<float> a(5, 4, false, 1), b(4, 6, false, 2), c(5, 6, false, 3);
  EXPECT_THROW(gemm(a.view, b.view.t(), c.view, false), engine::InvalidArgument);
  EXPECT_THROW(gemm(a.view, b.view, c.view.t(), false), engine::InvalidArgument);
  MatrixView<float> narrow = c.view;
  narrow.ld = 5;
  EXPECT_THROW(gemm(a.view, b.view, narrow, false), engine::InvalidArgument);
  const engine::Memory memory;
  const engine::Tensor t = engine::Tensor::zeros(memory, {2, 3}, engine::DType::kF32);
  EXPECT_THROW(matrix<float>(t, 2, 2), engine::InvalidArgument);
  EXPECT_THROW(matrix<const BFloat16>(t, 2, 3), engine::InvalidArgument);
}

TEST(Gemm, CountsFlops) { EXPECT_EQ(gemm_flops(2, 3, 5), 60); }

}  // namespace
}  // namespace tessera::ops
