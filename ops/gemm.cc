#include "ops/gemm.h"

#include <Eigen/Core>
#include <algorithm>
#include <cstring>

#include "engine/elementwise.h"

namespace tessera::ops {

using engine::BFloat16;
using engine::Category;
using engine::DType;
using engine::Memory;
using engine::Tensor;

namespace {

// [Note: which part of Eigen]
// Eigen's packed kernel runs at 85-95 % of peak on the shapes of a transformer, and it is called
// directly: the expression `c.noalias() += a * b` would send vectors and small matrices to other
// kernels whose order of additions depends on the alignment of the pointers, and would choose its
// blocks, and so the splits of K that reach the bits, by the caches of this machine.
// This is the only file that includes Eigen: code compiled with two sets of flags must not share
// its inline functions.
class FixedBlocking : public Eigen::internal::level3_blocking<float, float> {
 public:
  explicit FixedBlocking(std::int64_t k) {
    // Panels of at most kMaxDepth, of equal size: 24 rows of one fit a 32 KiB first-level cache
    // beside 4 columns; a block of kRows of them fits a 512 KiB second-level cache.
    const std::int64_t panels = std::max<std::int64_t>((k + kMaxDepth - 1) / kMaxDepth, 1);
    m_kc = ((k + panels - 1) / panels + 7) / 8 * 8;
    m_mc = kRows;
    m_nc = kCols;
  }

 private:
  static constexpr std::int64_t kMaxDepth = 256, kRows = 192, kCols = 1024;
};

// Column-major C (m, n) += A (m, k) B (k, n).
template <int kOrderA, int kOrderB>
void add_product(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                 std::int64_t ldc, std::int64_t m, std::int64_t n, std::int64_t k) {
  FixedBlocking blocking(k);
  Eigen::internal::general_matrix_matrix_product<std::int64_t, float, kOrderA, false, float,
                                                 kOrderB, false, Eigen::ColMajor,
                                                 /*ResInnerStride=*/1>::run(m, n, k, a, lda, b, ldb,
                                                                            c, /*resIncr=*/1, ldc,
                                                                            1.0f, blocking);
}

template <class T>
std::int64_t stored_rows(const MatrixView<T>& m) {
  return m.transposed ? m.cols : m.rows;
}

template <class T>
std::int64_t stored_cols(const MatrixView<T>& m) {
  return m.transposed ? m.rows : m.cols;
}

template <class T>
void check_layout(const MatrixView<T>& m, const char* name) {
  engine::require(m.rows >= 0 && m.cols >= 0 && m.ld >= stored_cols(m),
                  "[gemm] expected a leading dimension of at least {}, got {} ({})", stored_cols(m),
                  m.ld, name);
}

// An f32 view of `m`: itself, or a widened copy that `workspace` keeps alive.
MatrixView<const float> widen(const Memory&, const MatrixView<const float>& m, Tensor&) {
  return m;
}

MatrixView<const float> widen(const Memory& memory, const MatrixView<const BFloat16>& m,
                              Tensor& workspace) {
  const std::int64_t rows = stored_rows(m), cols = stored_cols(m);
  workspace =
      Tensor::empty(memory, {rows, cols}, DType::kF32, "gemm.operand", Category::kWorkspace);
  float* dst = workspace.data<float>();
  for (std::int64_t i = 0; i < rows; ++i) {
    const BFloat16* src = m.data + i * m.ld;
    for (std::int64_t j = 0; j < cols; ++j) dst[i * cols + j] = src[j].to_float();
  }
  return {dst, m.rows, m.cols, cols, m.transposed};
}

}  // namespace

void gemm(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
          bool accumulate) {
  engine::require(a.cols == b.rows && a.rows == c.rows && b.cols == c.cols,
                  "[gemm] expected (M, K) (K, N) -> (M, N), got ({}, {}) ({}, {}) -> ({}, {})",
                  a.rows, a.cols, b.rows, b.cols, c.rows, c.cols);
  check_layout(a, "A");
  check_layout(b, "B");
  check_layout(c, "C");
  if (c.transposed) return gemm(b.t(), a.t(), c.t(), accumulate);
  if (!accumulate && c.cols > 0) {
    for (std::int64_t i = 0; i < c.rows; ++i)
      std::memset(c.data + i * c.ld, 0, static_cast<std::size_t>(c.cols) * sizeof(float));
  }
  if (c.rows == 0 || c.cols == 0 || a.cols == 0) return;
  // Row-major C is column-major C^T = B^T A^T, and each operand changes its order as well.
  const auto product = b.transposed
                           ? (a.transposed ? add_product<Eigen::RowMajor, Eigen::RowMajor>
                                           : add_product<Eigen::RowMajor, Eigen::ColMajor>)
                           : (a.transposed ? add_product<Eigen::ColMajor, Eigen::RowMajor>
                                           : add_product<Eigen::ColMajor, Eigen::ColMajor>);
  product(b.data, b.ld, a.data, a.ld, c.data, c.ld, c.cols, c.rows, a.cols);
}

template <class A, class B, class C>
void gemm(const Memory& memory, MatrixView<const A> a, MatrixView<const B> b, MatrixView<C> c,
          bool accumulate) {
  Tensor a_f32, b_f32;
  const MatrixView<const float> wide_a = widen(memory, a, a_f32), wide_b = widen(memory, b, b_f32);
  if constexpr (std::is_same_v<C, float>) {
    gemm(wide_a, wide_b, c, accumulate);
  } else {
    check_layout(c, "C");
    if (c.transposed) return gemm(memory, b.t(), a.t(), c.t(), accumulate);
    const Tensor product =
        Tensor::empty(memory, {c.rows, c.cols}, DType::kF32, "gemm.product", Category::kWorkspace);
    gemm(wide_a, wide_b, matrix<float>(product, c.rows, c.cols), false);
    for (std::int64_t i = 0; i < c.rows; ++i) {
      engine::assign_or_add(c.data + i * c.ld, product.data<float>() + i * c.cols, c.cols,
                            accumulate);
    }
  }
}

template void gemm(const Memory&, MatrixView<const float>, MatrixView<const float>,
                   MatrixView<float>, bool);
template void gemm(const Memory&, MatrixView<const float>, MatrixView<const float>,
                   MatrixView<BFloat16>, bool);
template void gemm(const Memory&, MatrixView<const float>, MatrixView<const BFloat16>,
                   MatrixView<float>, bool);
template void gemm(const Memory&, MatrixView<const float>, MatrixView<const BFloat16>,
                   MatrixView<BFloat16>, bool);
template void gemm(const Memory&, MatrixView<const BFloat16>, MatrixView<const float>,
                   MatrixView<float>, bool);
template void gemm(const Memory&, MatrixView<const BFloat16>, MatrixView<const float>,
                   MatrixView<BFloat16>, bool);
template void gemm(const Memory&, MatrixView<const BFloat16>, MatrixView<const BFloat16>,
                   MatrixView<float>, bool);
template void gemm(const Memory&, MatrixView<const BFloat16>, MatrixView<const BFloat16>,
                   MatrixView<BFloat16>, bool);

}  // namespace tessera::ops
