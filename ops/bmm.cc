#include "ops/bmm.h"

#include <string_view>
#include <type_traits>

#include "engine/gemm/gemm.h"
#include "engine/gemm/gemm_cuda.h"

namespace tessera::ops {

using engine::DeviceMatrix;
using engine::DType;
using engine::GradTarget;
using engine::MatrixView;
using engine::Product;
using engine::Products;
using engine::require;
using engine::Tape;
using engine::Tensor;

namespace {

// (B, rows, cols) as it is stored, and whether each matrix of it is to be read as its transpose.
struct Batch {
  Tensor stored;
  bool transposed = false;

  std::int64_t rows() const { return stored.dim(transposed ? 2 : 1); }
  std::int64_t cols() const { return stored.dim(transposed ? 1 : 2); }
  Batch t() const { return {stored, !transposed}; }

  template <class T>
  MatrixView<T> matrix(std::int64_t i) const {
    const std::int64_t r = stored.dim(1), c = stored.dim(2);
    const MatrixView<T> m{stored.data<std::remove_const_t<T>>() + i * r * c, r, c, c};
    return transposed ? m.t() : m;
  }
  DeviceMatrix device_matrix(std::int64_t i) const {
    const std::int64_t r = stored.dim(1), c = stored.dim(2);
    const DeviceMatrix m{stored.raw() + i * r * c * size_of(stored.dtype()), stored.dtype(), r, c,
                         c};
    return transposed ? m.t() : m;
  }
};

// c[i] = or += a[i] b[i].
struct BatchedProduct {
  Batch a, b, c;
  bool accumulate = false;

  template <class T>
  Product<T, T, T> product(std::int64_t i) const {
    return {a.matrix<const T>(i), b.matrix<const T>(i), c.matrix<T>(i), accumulate};
  }
};

void launch(const Tape& tape, std::string_view name, const BatchedProduct& p) {
  const Tensor& c = p.c.stored;
  const std::int64_t num_matrices = c.dim(0);
  auto& products = tape.stream().state<Products>();
  Tensor scratch;  // of one product: all have one shape
  if (!tape.stream().device().is_cuda() && num_matrices > 0) {
    engine::dispatch_float(c.dtype(), "bmm", [&](auto t) {
      scratch = gemm_scratch(tape.memory(), p.product<decltype(t)>(0).scratch_nbytes(products));
    });
  }
  tape.stream().launch(
      {.name = name,
       .flops = static_cast<double>(num_matrices) *
                engine::gemm_flops(p.c.rows(), p.c.cols(), p.a.cols()),
       .bytes_read = p.a.stored.nbytes() + p.b.stored.nbytes() + (p.accumulate ? c.nbytes() : 0),
       .bytes_written = c.nbytes()},
      [=, &products] {
        engine::dispatch_float(p.c.stored.dtype(), "bmm", [&](auto t) {
          for (std::int64_t i = 0; i < num_matrices; ++i)
            p.product<decltype(t)>(i).run(products, scratch);
        });
      },
      [&](const auto& stream) {
        for (std::int64_t i = 0; i < num_matrices; ++i) {
          gemm_cuda(stream, tape.memory(),
                    {.a = p.a.device_matrix(i),
                     .b = p.b.device_matrix(i),
                     .c = p.c.device_matrix(i),
                     .accumulate = p.accumulate});
        }
      });
}

}  // namespace

Tensor bmm(Tape& tape, const Tensor& a, const Tensor& b, const BmmOptions& options) {
  require(a.dtype() == b.dtype() && (a.dtype() == DType::kF32 || a.dtype() == DType::kBF16),
          "[bmm] expected f32 or bf16, both alike, got {} and {} ({}, {})", name_of(a.dtype()),
          name_of(b.dtype()), a.name(), b.name());
  require(a.shape().rank() == 3 && b.shape().rank() == 3,
          "[bmm] expected (B, M, K) and (B, K, N), got {} and {} ({}, {})", a.shape(), b.shape(),
          a.name(), b.name());
  const Batch left{a, options.transpose_a}, right{b, options.transpose_b};
  require(a.dim(0) == b.dim(0) && left.cols() == right.rows(),
          "[bmm] expected one batch and one inner dimension, got {}{} and {}{} ({}, {})", a.shape(),
          left.transposed ? " transposed" : "", b.shape(), right.transposed ? " transposed" : "",
          a.name(), b.name());
  const bool wants_da = tape.needs_grad(a), wants_db = tape.needs_grad(b);
  const Tensor y = tape.empty({a.dim(0), left.rows(), right.cols()}, a.dtype(), "bmm");
  launch(tape, "bmm.forward", {left, right, {y}});
  if (!wants_da && !wants_db) return y;
  const Batch saved_a{wants_db ? a : a.without_data(), left.transposed},
      saved_b{wants_da ? b : b.without_data(), right.transposed};
  tape.record("bmm", y, [&tape, a = saved_a, b = saved_b](const Tensor& dy) {
    // One after the other: a and b may be the same tensor.
    if (const GradTarget da = tape.grad_target(a.stored))
      launch(tape, "bmm.backward_a", {{dy}, b.t(), {da.dst, a.transposed}, da.accumulate});
    if (const GradTarget db = tape.grad_target(b.stored))
      launch(tape, "bmm.backward_b", {a.t(), {dy}, {db.dst, b.transposed}, db.accumulate});
  });
  return y;
}

}  // namespace tessera::ops
