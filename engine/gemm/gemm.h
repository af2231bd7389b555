// Matrix products on the CPU, for ops and for reducers: models use ops::linear and ops::attention.
//
//   gemm(products, memory, matrix<const T>(x, rows, in), matrix<const T>(w, in, out),
//        matrix<T>(y, rows, out), /*accumulate=*/false);
//
// In the calling thread, and reentrant. On one machine bits are a function of operands, shapes and
// leading dimensions: not of pointers. Another CPU or library may have others.
//
// [Note: who multiplies]
// oneDNN, which writes its kernels for the CPU it finds, where it is installed and the product is
// not tiny; Eigen otherwise; and our own kernels where A is one row ([Note: a vector at a time])
// and, on a CPU with AVX-512, where B is small ([Note: products without packing]). bf16 is
// multiplied as bf16 with sums in f32 where the CPU has instructions for it, and is widened to f32
// elsewhere. choose_cpu() (engine/cpu_choice.h) with kEigen or kOneDnn insists; with kSplit, on a
// CPU with AMX, it has f32 products multiplied in parts of bf16 where they are large ([Note: three
// parts of an f32]) and have scratch; with n threads oneDNN shares each product between them: bits
// may depend on n. What a product takes depends on shapes, never on timings, so that runs repeat.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "engine/dtype.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::engine {

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
MatrixView<T> matrix(const Tensor& x, std::int64_t rows, std::int64_t cols) {
  require(rows * cols == x.numel(), "[matrix] expected {} elements, got {} ({})", rows * cols,
          x.numel(), x.name());
  return {x.data<std::remove_const_t<T>>(), rows, cols, cols};
}

class Bf16Products;

/// What products on one stream keep between calls. Stream::state() makes it and holds it.
class Products {
 public:
  explicit Products(const Stream& stream);
  ~Products();
  /// Only where multiplies_bf16().
  Bf16Products& bf16();

 private:
  std::unique_ptr<Bf16Products> bf16_;
};

/// Who multiplies on this CPU, for people: "oneDNN 2.6.3", "Eigen 3.4.0", "oneDNN 2.6.3, f32
/// split".
std::string gemm_library();
/// Whether f32 (but for small products) is multiplied in parts of bf16.
bool splits_f32();
/// Threads that share a product; more than 1 with oneDNN alone.
int threads_per_product();
/// Whether products of bf16 by bf16 (but for tiny ones) are done without widening.
bool multiplies_bf16();

/// C (M, N) = A (M, K) B (K, N), or C += with `accumulate`; f32 throughout. C must not overlap A or
/// B. M, N, K may be 0. Never split, as it has no scratch. Throws InvalidArgument unless the shapes
/// fit.
void gemm(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
          bool accumulate);

/// C = AB or C += AB for any mix of f32 and bf16 storage, with sums in f32; a bf16 C is rounded
/// once: bf16(AB) or bf16(C + AB). `bias` (N) is added to each row of a C that is assigned and not
/// transposed. bf16 that meets f32 is widened, as are both where the CPU does not multiply bf16.
/// `scratch`: gemm_scratch_nbytes() of the same product, 256-byte aligned; null if they are 0.
template <class A, class B, class C>
void gemm(Products& products, std::byte* scratch, MatrixView<const A> a, MatrixView<const B> b,
          MatrixView<C> c, bool accumulate, const B* bias = nullptr);
/// Reads no element.
template <class A, class B, class C>
std::int64_t gemm_scratch_nbytes(Products& products, MatrixView<const A> a, MatrixView<const B> b,
                                 MatrixView<C> c, bool accumulate, bool has_bias = false);
/// Workspace of `memory`; undefined if `nbytes` is 0.
Tensor gemm_scratch(const Memory& memory, std::int64_t nbytes);

/// A product as a value: what gemm() is given.
template <class A, class B, class C>
struct Product {
  MatrixView<const A> a;
  MatrixView<const B> b;
  MatrixView<C> c;
  bool accumulate = false;
  const B* bias = nullptr;

  std::int64_t scratch_nbytes(Products& products) const {
    return gemm_scratch_nbytes(products, a, b, c, accumulate, bias != nullptr);
  }
  /// `scratch` of gemm_scratch().
  void run(Products& products, const Tensor& scratch) const {
    gemm(products, scratch.defined() ? scratch.raw() : nullptr, a, b, c, accumulate, bias);
  }
};

/// gemm() with scratch of its own.
template <class A, class B, class C>
void gemm(Products& products, const Memory& memory, MatrixView<const A> a, MatrixView<const B> b,
          MatrixView<C> c, bool accumulate, const B* bias = nullptr) {
  const Product<A, B, C> product{a, b, c, accumulate, bias};
  product.run(products, gemm_scratch(memory, product.scratch_nbytes(products)));
}

/// Multiplications and additions of an (m, k) by (k, n) product.
inline double gemm_flops(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

}  // namespace tessera::engine
