#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "ops/normalize.cuh"
#include "ops/normalize_cuda.h"

namespace tessera::ops {

using engine::Stream;

namespace {

constexpr int kWarpThreads = 256;  // of a block where a warp has a row to itself

template <class T>
struct ForwardArgs {
  const T *x, *h, *w, *bias;  // h and bias may be null
  T *sum, *y;
  float *mean, *rstd;  // mean may be null
  std::int64_t rows, cols;
  float eps;
};

template <int kWidth, bool kAligned, class T>
__global__ void __launch_bounds__(kMaxRowThreads) forward_kernel(ForwardArgs<T> a) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const std::int64_t cols = row < a.rows ? a.cols : 0;  // a row of nothing takes part in the sums
  const std::int64_t begin = threadIdx.x * kWidth, step = blockDim.x * kWidth;
  const T* x = a.x + row * a.cols;
  float first[kWidth] = {}, total[1] = {}, squares[1] = {};
  for (std::int64_t c = begin; c < cols; c += step) {
    float values[kWidth];
    read_vector<kWidth, kAligned>(values, x + c);
    if (a.h != nullptr) {
      float h[kWidth];
      read_vector<kWidth, kAligned>(h, a.h + row * a.cols + c);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        T rounded;
        engine::store_f32(rounded, values[k] + h[k]);
        values[k] = engine::to_f32(rounded);
      }
      write_vector<kWidth, kAligned>(a.sum + row * a.cols + c, values);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      total[0] += values[k];
      if (c == begin) first[k] = values[k];
    }
  }
  if (a.h != nullptr) x = a.sum + row * a.cols;  // which this thread wrote where it reads it
  const auto read = [&](float(&values)[kWidth], std::int64_t c) {
    if (c != begin) return read_vector<kWidth, kAligned>(values, x + c);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = first[k];
  };

  const auto size = static_cast<float>(a.cols);
  float mean = 0;
  if (a.mean != nullptr) {
    row_sums(total, 0);
    mean = total[0] / size;
  }
  for (std::int64_t c = begin; c < cols; c += step) {
    float values[kWidth];
    read(values, c);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) squares[0] += (values[k] - mean) * (values[k] - mean);
  }
  row_sums(squares, 1);
  const float rstd = 1.0f / sqrtf(squares[0] / size + a.eps);
  if (threadIdx.x == 0 && row < a.rows) {
    if (a.mean != nullptr) a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
  for (std::int64_t c = begin; c < cols; c += step) {
    float values[kWidth], w[kWidth], bias[kWidth] = {};
    read(values, c);
    read_vector<kWidth, kAligned>(w, a.w + c);
    if (a.bias != nullptr) read_vector<kWidth, kAligned>(bias, a.bias + c);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = (values[k] - mean) * rstd * w[k] + bias[k];
    write_vector<kWidth, kAligned>(a.y + row * a.cols + c, values);
  }
}

// A warp to a row, of at most kVectors * kWarp * kWidth columns, which stay in registers.
template <int kWidth, int kVectors, bool kAligned, class T>
__global__ void __launch_bounds__(kWarpThreads) warp_forward_kernel(ForwardArgs<T> a) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  const int cols = static_cast<int>(a.cols);
  const auto at = [](int v) { return (v * kWarp + static_cast<int>(threadIdx.x)) * kWidth; };
  const T* x = a.x + row * a.cols;
  float values[kVectors][kWidth] = {}, total[1] = {}, squares[1] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (at(v) < cols) read_vector<kWidth, kAligned>(values[v], x + at(v));
  if (a.h != nullptr) {
    const T* h = a.h + row * a.cols;
    float more[kVectors][kWidth] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (at(v) < cols) read_vector<kWidth, kAligned>(more[v], h + at(v));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (at(v) >= cols) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[v][k] += more[v][k];
      write_and_round<kWidth, kAligned>(a.sum + row * a.cols + at(v), values[v],
                                        /*accumulate=*/false);
    }
  }

  const auto size = static_cast<float>(a.cols);
  float mean = 0;
  if (a.mean != nullptr) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) total[0] += values[v][k];
    }
    warp_sums(total);
    mean = total[0] / size;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (at(v) >= cols) continue;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) squares[0] += (values[v][k] - mean) * (values[v][k] - mean);
  }
  warp_sums(squares);
  const float rstd = 1.0f / sqrtf(squares[0] / size + a.eps);
  if (threadIdx.x == 0) {
    if (a.mean != nullptr) a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (at(v) >= cols) continue;
    float w[kWidth], bias[kWidth] = {};
    read_vector<kWidth, kAligned>(w, a.w + at(v));
    if (a.bias != nullptr) read_vector<kWidth, kAligned>(bias, a.bias + at(v));
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[v][k] = (values[v][k] - mean) * rstd * w[k] + bias[k];
    write_vector<kWidth, kAligned>(a.y + row * a.cols + at(v), values[v]);
  }
}

// Calls fn with how many vectors of kWidth columns a lane has of a row, or false if they are too
// many for registers.
template <int kWidth, class F>
bool dispatch_vectors(std::int64_t cols, F fn) {
  if constexpr (kWidth > 1) {
    const std::int64_t vectors = (cols + kWarp * kWidth - 1) / (kWarp * kWidth);
    const auto call = [&](auto most) {
      if (vectors > most) return false;
      fn(most);
      return true;
    };
    return call(std::integral_constant<int, 1>()) || call(std::integral_constant<int, 2>()) ||
           call(std::integral_constant<int, 3>()) || call(std::integral_constant<int, 4>()) ||
           call(std::integral_constant<int, 6>()) || call(std::integral_constant<int, 8>());
  } else {
    return false;
  }
}

}  // namespace

void normalize_forward_cuda(const Stream& stream, const NormForward& n) {
  const std::int64_t rows = n.y.shape().rows(), cols = n.y.dim(-1);
  engine::dispatch_float(n.y.dtype(), "normalize", [&](auto t) {
    using T = decltype(t);
    dispatch_width<T>(cols, [&](auto width) {
      constexpr int kWidth = width;
      const ForwardArgs<T> a{.x = n.x.data<T>(),
                             .h = data_or_null<T>(n.h),
                             .w = n.w.data<T>(),
                             .bias = data_or_null<T>(n.bias),
                             .sum = data_or_null<T>(n.sum),
                             .y = n.y.data<T>(),
                             .mean = data_or_null<float>(n.mean),
                             .rstd = n.rstd.data<float>(),
                             .rows = rows,
                             .cols = cols,
                             .eps = n.eps};
      const bool aligned = are_aligned<kWidth>(a.x, a.h, a.w, a.bias, a.sum, a.y);
      const auto launch = [&](dim3 block, auto kernel) {
        const auto blocks = static_cast<unsigned>((rows + block.y - 1) / block.y);
        engine::launch_kernel(stream, {.grid = dim3(blocks), .block = block}, kernel, a);
      };
      const bool fits = dispatch_vectors<kWidth>(cols, [&](auto vectors) {
        constexpr int kVectors = vectors;
        launch(dim3(kWarp, kWarpThreads / kWarp),
               aligned ? warp_forward_kernel<kWidth, kVectors, true, T>
                       : warp_forward_kernel<kWidth, kVectors, false, T>);
      });
      if (fits) return;
      launch(block_of(cols, kWidth, kMaxRowThreads, 256),
             aligned ? forward_kernel<kWidth, true, T> : forward_kernel<kWidth, false, T>);
    });
  });
}

}  // namespace tessera::ops
