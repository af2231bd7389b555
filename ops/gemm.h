// Matrix products on the CPU. Private to ops: models use ops::linear and ops::attention.
//
//   gemm(memory, matrix<const T>(x, rows, in), matrix<const T>(w, in, out), matrix<T>(y, rows,
//   out),
//        /*accumulate=*/false);
//
// Single-threaded and reentrant. Bits are a function of operands and shapes alone: not of pointers,
// of leading dimensions or of the machine's caches.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engine/dtype.h"
#include "engine/memory.h"
#include "engine/tensor.h"

namespace tessera::ops {

/// A row-major matrix in someone's memory, or the transpose of one. T is float, BFloat16 or const
/// of these.
template <class T>
struct MatrixView {
  T* data = nullptr;
  std::int64_t rows = 0;  ///< logical: after transposition
  std::int64_t cols = 0;
  std::int64_t ld = 0;      ///< elements between stored rows, at least the length of a stored row
  bool transposed = false;  ///< element (i, j) is data[j * ld + i]

  MatrixView t() const { return {data, cols, rows, ld, !transposed}; }
  // NOLINTNEXTLINE(google-explicit-constructor): like a pointer to const
  operator MatrixView<const T>() const requires(!std::is_const_v<T>) {
    return {data, rows, cols, ld, transposed};
  }
};

/// The elements of `x` as (rows, cols). Throws InvalidArgument if T is not its dtype, if `x` is
/// released or has another number of elements.
template <class T>
MatrixView<T> matrix(const engine::Tensor& x, std::int64_t rows, std::int64_t cols) {
  engine::require(rows * cols == x.numel(), "[matrix] expected {} elements, got {} ({})",
                  rows * cols, x.numel(), x.name());
  return {x.data<std::remove_const_t<T>>(), rows, cols, cols};
}

/// C (M, N) = A (M, K) B (K, N), or C += with `accumulate`; f32 throughout. C must not overlap A or
/// B. M, N, K may be 0. Throws InvalidArgument unless the shapes fit.
void gemm(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
          bool accumulate);

/// The same for any mix of f32 and bf16 storage: bf16 operands are widened into workspace of
/// `memory`, the product is f32, and a bf16 C is rounded once: bf16(AB) or bf16(C + AB).
template <class A, class B, class C>
void gemm(const engine::Memory& memory, MatrixView<const A> a, MatrixView<const B> b,
          MatrixView<C> c, bool accumulate);

/// Multiplications and additions of an (m, k) by (k, n) product.
inline double gemm_flops(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

}  // namespace tessera::ops
