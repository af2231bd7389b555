#include <algorithm>
#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "ops/column_sums.h"
#include "ops/normalize.cuh"
#include "ops/normalize_cuda.h"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Memory;
using engine::Stream;
using engine::Tensor;

// [Note: gradients of the parameters of a norm]
// dw and dbias are sums over all rows, added up in three steps, each in a fixed order: a thread
// over the rows of its group, the groups of a block, and a second kernel over the at most
// kMaxBlocks blocks. That number is the same on every GPU, so that the bits are. So are the sums of
// the columns of dx, but for the last step, which is left to whoever wants them.

namespace {

constexpr int kMaxThreads = 512;          // of a block
constexpr int kResidentThreads = 768;     // at work on a multiprocessor: so at most 80 registers
constexpr std::int64_t kMaxBlocks = 512;  // of backward: three or four for each of an H100's units

template <class T>
struct BackwardArgs {
  const T *dy, *x, *w, *residual;  // residual may be null
  const float *mean, *rstd;        // mean may be null
  T* dx;                           // may be null
  bool accumulate;
  float *dw, *dbias, *dx_sums;  // (blocks, C), a row a block; may be null
  std::int64_t rows, cols;
};

// Adds `values` to, or in the first of the rows of a block assigns, columns that are not kept in
// registers.
template <int kWidth>
__device__ void add_partial(float* partial, const float (&values)[kWidth], bool is_first) {
  if (partial != nullptr) write_vector<kWidth, true>(partial, values, !is_first);
}

// Adds the registers of the other groups of the block to those of the first one.
template <int kWidth>
__device__ void sum_groups(float (&values)[kWidth]) {
  float* shared = engine::dynamic_shared<float>() + threadIdx.x * kWidth;
  for (unsigned group = 1; group < blockDim.y; ++group) {
    __syncthreads();
    if (threadIdx.y == group) write_vector<kWidth, true>(shared, values);
    __syncthreads();
    if (threadIdx.y != 0) continue;
    float other[kWidth];
    read_vector<kWidth, true>(other, shared);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] += other[k];
  }
}

// kOnce: the threads cover a row at once. kAligned: of T; the f32 partial sums are.
template <int kWidth, bool kAligned, bool kOnce, class T>
__global__ void __launch_bounds__(kOnce ? kResidentThreads : kMaxThreads)
    backward_kernel(BackwardArgs<T> a) {
  const std::int64_t begin = threadIdx.x * kWidth, step = blockDim.x * kWidth;
  const std::int64_t rows_at_once = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  const auto size = static_cast<float>(a.cols);
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y;
  const std::int64_t partial_row = static_cast<std::int64_t>(blockIdx.x) * a.cols;
  float w_first[kWidth] = {}, dw[kWidth] = {}, dbias[kWidth] = {}, dx_sums[kWidth] = {};
  if (begin < a.cols) read_vector<kWidth, kAligned>(w_first, a.w + begin);

  for (std::int64_t base = first_row; base < a.rows; base += rows_at_once) {
    const std::int64_t row = base + threadIdx.y;
    const std::int64_t cols = row < a.rows ? a.cols : 0;
    const T *x = a.x + row * a.cols, *dy = a.dy + row * a.cols;
    const float mean = cols > 0 && a.mean != nullptr ? a.mean[row] : 0;
    const float rstd = cols > 0 ? a.rstd[row] : 0;
    float xhat_first[kWidth] = {}, dy_first[kWidth] = {};
    // Columns [c, c + kWidth) of xhat, dy and w.
    const auto read = [&](float(&xhat)[kWidth], float(&d)[kWidth], float(&w)[kWidth],
                          std::int64_t c) {
      read_vector<kWidth, kAligned>(xhat, x + c);
      read_vector<kWidth, kAligned>(d, dy + c);
      if (!kOnce && c != begin) read_vector<kWidth, kAligned>(w, a.w + c);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        xhat[k] = (xhat[k] - mean) * rstd;
        if (kOnce || c == begin) w[k] = w_first[k];
      }
    };

    float means[2] = {};  // of g = dy w and of g xhat
    for (std::int64_t c = begin; c < cols; c = kOnce ? cols : c + step) {
      float xhat[kWidth], d[kWidth], w[kWidth];
      read(xhat, d, w, c);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        means[0] += d[k] * w[k];
        means[1] += d[k] * w[k] * xhat[k];
        if (kOnce || c == begin) xhat_first[k] = xhat[k], dy_first[k] = d[k];
      }
    }
    if (a.dx != nullptr) row_sums(means);
    const float g_mean = a.mean != nullptr ? means[0] / size : 0, gx_mean = means[1] / size;

    for (std::int64_t c = begin; c < cols; c = kOnce ? cols : c + step) {
      float xhat[kWidth], d[kWidth], w[kWidth], out[kWidth] = {};
      if (kOnce || c == begin) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          xhat[k] = xhat_first[k], d[k] = dy_first[k], w[k] = w_first[k];
      } else {
        read(xhat, d, w, c);
      }
      if (a.dx != nullptr) {
        if (a.residual != nullptr)
          read_vector<kWidth, kAligned>(out, a.residual + row * a.cols + c);
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          out[k] += rstd * (d[k] * w[k] - g_mean - xhat[k] * gx_mean);
        write_and_round<kWidth, kAligned>(a.dx + row * a.cols + c, out, a.accumulate);
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        xhat[k] *= d[k];
        if (kOnce || c == begin) dw[k] += xhat[k], dbias[k] += d[k], dx_sums[k] += out[k];
      }
      if (!kOnce && c != begin) {
        add_partial(a.dw == nullptr ? nullptr : a.dw + partial_row + c, xhat, base == first_row);
        add_partial(a.dbias == nullptr ? nullptr : a.dbias + partial_row + c, d, base == first_row);
        add_partial(a.dx_sums == nullptr ? nullptr : a.dx_sums + partial_row + c, out,
                    base == first_row);
      }
    }
  }
  sum_groups(dw);
  sum_groups(dbias);
  if (a.dx_sums != nullptr) sum_groups(dx_sums);
  if (threadIdx.y != 0 || begin >= a.cols) return;
  add_partial(a.dw == nullptr ? nullptr : a.dw + partial_row + begin, dw, true);
  add_partial(a.dbias == nullptr ? nullptr : a.dbias + partial_row + begin, dbias, true);
  add_partial(a.dx_sums == nullptr ? nullptr : a.dx_sums + partial_row + begin, dx_sums, true);
}

}  // namespace

Tensor normalize_backward_cuda(const Stream& stream, const Memory& memory, const NormBackward& n) {
  const std::int64_t rows = n.x.shape().rows(), cols = n.x.dim(-1);
  Tensor dx_sums;
  engine::dispatch_float(n.x.dtype(), "normalize", [&](auto t) {
    using T = decltype(t);
    dispatch_width<T>(cols, [&](auto width) {
      constexpr int kWidth = width;
      const dim3 block = block_of(cols, kWidth, kMaxThreads, kMaxThreads / 2);
      const std::int64_t blocks = std::min((rows + block.y - 1) / block.y, kMaxBlocks);
      const auto partials = [&](bool wanted) {
        return wanted ? Tensor::empty(memory, {blocks, cols}, DType::kF32, "normalize.sums",
                                      Category::kWorkspace)
                      : Tensor();
      };
      const Tensor dw = partials(bool(n.dw)), dbias = partials(bool(n.dbias));
      dx_sums = partials(n.dx.wants_column_sums);
      const BackwardArgs<T> a{.dy = n.dy.data<T>(),
                              .x = n.x.data<T>(),
                              .w = n.w.data<T>(),
                              .residual = data_or_null<T>(n.residual),
                              .mean = data_or_null<float>(n.mean),
                              .rstd = n.rstd.data<float>(),
                              .dx = data_or_null<T>(n.dx.dst),
                              .accumulate = n.dx.accumulate,
                              .dw = data_or_null<float>(dw),
                              .dbias = data_or_null<float>(dbias),
                              .dx_sums = data_or_null<float>(dx_sums),
                              .rows = rows,
                              .cols = cols};
      const std::size_t shared = block.y == 1 ? 0 : block.x * kWidth * sizeof(float);
      const bool aligned = are_aligned<kWidth>(a.dy, a.x, a.w, a.residual, a.dx);
      const bool once = cols <= static_cast<std::int64_t>(block.x) * kWidth;
      engine::launch_kernel(
          stream,
          {.grid = dim3(static_cast<unsigned>(blocks)), .block = block, .shared_nbytes = shared},
          once ? (aligned ? backward_kernel<kWidth, true, true, T>
                          : backward_kernel<kWidth, false, true, T>)
               : (aligned ? backward_kernel<kWidth, true, false, T>
                          : backward_kernel<kWidth, false, false, T>),
          a);
      if (n.dw) sum_parts_cuda(stream, n.dw, dw);
      if (n.dbias) sum_parts_cuda(stream, n.dbias, dbias);
    });
  });
  return dx_sums;
}

}  // namespace tessera::ops
