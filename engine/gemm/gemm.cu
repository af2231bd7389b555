#include "engine/cuda_launch.cuh"
#include "engine/gemm/cublaslt.h"
#include "engine/gemm/gemm_cuda.h"

namespace tessera::engine {

namespace {

// Strides of a matrix in elements.
template <class T>
struct Strided {
  T* data;
  std::int64_t row, col;

  __device__ T& at(std::int64_t i, std::int64_t j) const { return data[i * row + j * col]; }
};

template <class T>
Strided<T> strided(const DeviceMatrix& m) {
  return {static_cast<T*>(m.data), m.transposed ? 1 : m.ld, m.transposed ? m.ld : 1};
}

constexpr int kTile = 32;       // rows and columns of C that a block makes, and depth of a step
constexpr int kRowsAtOnce = 8;  // threads of a column of the tile
constexpr int kRowsPerThread = kTile / kRowsAtOnce;

// One order of additions for everything: k = 0, 1, 2, ...
template <class A, class B, class C>
__global__ void plain_gemm_kernel(Strided<A> a, Strided<B> b, Strided<C> c, const C* bias,
                                  const float* scales, std::int64_t rows, std::int64_t cols,
                                  std::int64_t depth, bool accumulate) {
  __shared__ float a_tile[kTile][kTile + 1];
  __shared__ float b_tile[kTile][kTile + 1];
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const auto tiles_wide = static_cast<unsigned>((cols + kTile - 1) / kTile);
  const std::int64_t i0 = std::int64_t{blockIdx.x / tiles_wide} * kTile,
                     j0 = std::int64_t{blockIdx.x % tiles_wide} * kTile;
  float sums[kRowsPerThread] = {};
  for (std::int64_t k0 = 0; k0 < depth; k0 += kTile) {
    for (int r = y; r < kTile; r += kRowsAtOnce) {
      a_tile[r][x] = i0 + r < rows && k0 + x < depth ? to_f32(a.at(i0 + r, k0 + x)) : 0.0f;
      b_tile[r][x] = k0 + r < depth && j0 + x < cols ? to_f32(b.at(k0 + r, j0 + x)) : 0.0f;
    }
    __syncthreads();
    for (int k = 0; k < kTile; ++k) {
      for (int n = 0; n < kRowsPerThread; ++n)
        sums[n] = fmaf(a_tile[y + n * kRowsAtOnce][k], b_tile[k][x], sums[n]);
    }
    __syncthreads();
  }
  const float alpha = scales != nullptr ? scales[0] : 1.0f;
  const std::int64_t j = j0 + x;
  for (int n = 0; n < kRowsPerThread; ++n) {
    const std::int64_t i = i0 + y + n * kRowsAtOnce;
    if (i >= rows || j >= cols) continue;
    float value = alpha * sums[n];
    if (bias != nullptr) value += to_f32(bias[j]);
    if (accumulate) value += to_f32(c.at(i, j));
    store_f32(c.at(i, j), value);
  }
}

void plain_gemm(const Stream& stream, const DeviceProduct& p) {
  const auto tiles = [](std::int64_t n) { return (n + kTile - 1) / kTile; };
  dispatch_float(p.a.dtype, "gemm", [&](auto a) {
    dispatch_float(p.b.dtype, "gemm", [&](auto b) {
      dispatch_float(p.c.dtype, "gemm", [&](auto c) {
        using A = decltype(a);
        using B = decltype(b);
        using C = decltype(c);
        launch_kernel(stream,
                      {.grid = dim3(static_cast<unsigned>(tiles(p.c.rows) * tiles(p.c.cols))),
                       .block = dim3(kTile, kRowsAtOnce)},
                      plain_gemm_kernel<const A, const B, C>, strided<const A>(p.a),
                      strided<const B>(p.b), strided<C>(p.c), static_cast<const C*>(p.bias),
                      p.scales, p.c.rows, p.c.cols, p.a.cols, p.accumulate);
      });
    });
  });
}

void check_layout(const DeviceMatrix& m, const char* name) {
  const std::int64_t length = m.transposed ? m.rows : m.cols;
  require(m.rows >= 0 && m.cols >= 0 && m.ld >= length,
          "[gemm] expected a leading dimension of at least {}, got {} ({})", length, m.ld, name);
}

void gemm_with_gelu(const Stream& stream, const Memory& memory, const DeviceProduct& p) {
  const DeviceMatrix& h = p.before_gelu;
  require(h.rows == p.c.rows && h.cols == p.c.cols && h.ld == p.c.ld && h.ld == h.cols &&
              h.dtype == p.c.dtype && !h.transposed && !p.c.transposed && p.bias != nullptr &&
              p.gelu != nullptr && !p.accumulate && p.scales == nullptr,
          "[gemm] expected a product with a bias alone, and packed before and after GELU alike, "
          "got ({}, {}) ld {} and ({}, {}) ld {}",
          h.rows, h.cols, h.ld, p.c.rows, p.c.cols, p.c.ld);
  DeviceProduct apart = p;
  apart.c = h, apart.before_gelu = {}, apart.gelu = nullptr;
  if (h.rows > 0 && h.cols > 0) {
    note_gemm(stream, apart);  // first, since it is what tune_gemms() compares with
    note_gemm(stream, p);
    if (!stream.device().is_meta && cublaslt_gemm(stream, memory, p)) return;
  }
  gemm_cuda(stream, memory, apart);
  if (!stream.device().is_meta) p.gelu(stream, h.dtype, p.c.data, h.data, h.rows * h.cols);
}

void gemm_with_slope(const Stream& stream, const Memory& memory, const DeviceProduct& p) {
  const DeviceMatrix &at = p.slope.at, &sums = p.slope.column_sums;
  require(at.rows == p.c.rows && at.cols == p.c.cols && at.ld == p.c.ld && at.ld == at.cols &&
              at.dtype == p.c.dtype && !at.transposed && !p.c.transposed &&
              p.slope.finish != nullptr && p.bias == nullptr && p.before_gelu.data == nullptr &&
              !p.accumulate && p.scales == nullptr,
          "[gemm] expected a product alone, and packed as what GELU was taken of, got ({}, {}) ld "
          "{} and ({}, {}) ld {}",
          at.rows, at.cols, at.ld, p.c.rows, p.c.cols, p.c.ld);
  require(sums.data == nullptr || (sums.cols == p.c.cols && sums.ld == sums.cols &&
                                   sums.dtype == DType::kF32 && !sums.transposed),
          "[gemm] expected sums of {} columns f32, got {} ld {} {}", p.c.cols, sums.cols, sums.ld,
          name_of(sums.dtype));
  DeviceProduct apart = p;
  apart.slope = {};
  bool is_sloped = false;
  if (p.c.rows > 0 && p.c.cols > 0) {
    note_gemm(stream, apart);  // first, as above
    note_gemm(stream, p);
    is_sloped = !stream.device().is_meta && cublaslt_gemm(stream, memory, p);
  }
  if (!is_sloped) gemm_cuda(stream, memory, apart);
  if (!stream.device().is_meta) p.slope.finish(stream, p.c, p.slope, is_sloped);
}

}  // namespace

void gemm_cuda(const Stream& stream, const Memory& memory, const DeviceProduct& p) {
  require(p.a.cols == p.b.rows && p.a.rows == p.c.rows && p.b.cols == p.c.cols,
          "[gemm] expected (M, K) (K, N) -> (M, N), got ({}, {}) ({}, {}) -> ({}, {})", p.a.rows,
          p.a.cols, p.b.rows, p.b.cols, p.c.rows, p.c.cols);
  check_layout(p.a, "A");
  check_layout(p.b, "B");
  check_layout(p.c, "C");
  if (p.slope.at.data != nullptr) return gemm_with_slope(stream, memory, p);
  if (p.before_gelu.data != nullptr) return gemm_with_gelu(stream, memory, p);
  if (p.c.transposed) {
    require(p.bias == nullptr, "[gemm] expected no bias with a transposed C, got one");
    DeviceProduct transposed = p;
    transposed.a = p.b.t(), transposed.b = p.a.t(), transposed.c = p.c.t();
    return gemm_cuda(stream, memory, transposed);
  }
  if (p.c.rows == 0 || p.c.cols == 0) return;
  note_gemm(stream, p);
  if (stream.device().is_meta) return reserve_gemm_workspace(memory);
  if (!cublaslt_gemm(stream, memory, p)) plain_gemm(stream, p);
}

}  // namespace tessera::engine
