// Matrix products on a GPU, for ops and for reducers.
//
//   gemm_cuda(stream, memory, {.a = device_matrix(x, rows, in), .b = device_matrix(w, in, out),
//                              .c = device_matrix(y, rows, out), .bias = b.raw()});
#pragma once

#include <cstdint>
#include <type_traits>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::engine {

/// MatrixView (engine/gemm/gemm.h) of device memory, with its dtype as a value: f32 or bf16.
struct DeviceMatrix {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t rows = 0;  ///< logical: after transposition
  std::int64_t cols = 0;
  std::int64_t ld = 0;
  bool transposed = false;

  DeviceMatrix t() const { return {data, dtype, cols, rows, ld, !transposed}; }
  /// Rows [first, first + count) of a matrix that is not transposed.
  DeviceMatrix slice(std::int64_t first, std::int64_t count) const {
    auto* begin = static_cast<std::byte*>(data) + first * ld * size_of(dtype);
    return {begin, dtype, count, cols, ld, false};
  }
  friend bool operator==(const DeviceMatrix&, const DeviceMatrix&) = default;
};

/// The elements of `x` as (rows, cols). Throws InvalidArgument if it has another number of them.
inline DeviceMatrix device_matrix(const Tensor& x, std::int64_t rows, std::int64_t cols) {
  require(rows * cols == x.numel(), "[matrix] expected {} elements, got {} ({})", rows * cols,
          x.numel(), x.name());
  return {x.raw(), x.dtype(), rows, cols, cols, false};
}

/// y[i] = f(x[i]) for `numel` elements of `dtype`, enqueued.
using DeviceFunction = void (*)(const Stream& stream, DType dtype, void* y, const void* x,
                                std::int64_t numel);

/// The slope of GELU (tanh) that a product is multiplied with, and the sums of columns of what it
/// is then. See [Note: GELU in products] in cublaslt.cc.
struct GeluSlope {
  DeviceMatrix at;           ///< what GELU was taken of; of C's dtype and layout
  DeviceMatrix column_sums;  ///< with data: f32 (parts, N), for `finish` to fill
  /// Enqueues what is left to do: of C = AB, or with `is_sloped` of C = AB gelu'(at), makes the
  /// latter, rounded to C's dtype, and adds up the columns of it.
  void (*finish)(const Stream& stream, const DeviceMatrix& c, const GeluSlope& slope,
                 bool is_sloped) = nullptr;

  friend bool operator==(const GeluSlope&, const GeluSlope&) = default;
};

/// C (M, N) = alpha A (M, K) B (K, N), + bias (N) in every row, + C with `accumulate`.
struct DeviceProduct {
  DeviceMatrix a, b, c;
  bool accumulate = false;
  const void* bias = nullptr;  ///< of C's dtype; C not transposed then
  /// {alpha, 0, 1} in device memory, so that alpha need not be known to the host; null: alpha is 1.
  const float* scales = nullptr;
  /// With data: takes AB + bias, and C is GELU (tanh) of that; of C's dtype and layout. A bias, but
  /// neither alpha nor `accumulate`. See [Note: GELU in products] in cublaslt.cc.
  DeviceMatrix before_gelu = {};
  DeviceFunction gelu = nullptr;  ///< of it, for when cublasLt is not to do it
  /// With data at slope.at: C is AB gelu'(slope.at). No bias, no alpha, no `accumulate`, no
  /// before_gelu.
  GeluSlope slope = {};

  friend bool operator==(const DeviceProduct&, const DeviceProduct&) = default;
};

/// Enqueues the product. Sums are f32 (never TF32), and an element of C is rounded once, from
/// alpha AB + bias + C, but that some of cublasLt's kernels (of an H100: for small and odd shapes)
/// round alpha AB to a bf16 C's dtype before they add to it. The same bits every time for the same
/// shapes, layouts and addresses modulo 16; which bits may differ between models of GPU and
/// versions of cublasLt. Any mix of dtypes, and addresses aligned to their elements alone: what
/// cublasLt has no algorithm for (A and B of two dtypes, f32 A and B with a bf16 C, a bias not
/// aligned to 16 bytes, K = 0) runs in a plain kernel, many times slower. Workspace comes from
/// `memory`, whose home must be `stream`. Throws InvalidArgument unless the shapes fit,
/// DeviceError.
void gemm_cuda(const Stream& stream, const Memory& memory, const DeviceProduct& product);

}  // namespace tessera::engine
