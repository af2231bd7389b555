#include <algorithm>
#include <cstdint>
#include <utility>

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

constexpr int kLongThreads = 512;         // of a block whose rows nobody keeps
constexpr std::int64_t kMaxBlocks = 264;  // at most two for each of an H100's units

// A warp has a row to itself, so that none waits for others, as long as all that a lane keeps of it
// and of the sums fits 255 registers; longer rows have some warps of a block, of which two share a
// unit.
template <int kWidth>
constexpr int max_vectors = kWidth == 8 ? 3 : 4;
template <int kVectors>
constexpr int blocks_of_unit = kVectors > 1 ? 1 : 2;
template <int kVectors>
constexpr int threads_of = kVectors > 1 ? 256 : 288;

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
template <int kVectors, int kWidth>
__device__ void sum_groups(float (&values)[kVectors][kWidth]) {
  float* const shared = engine::dynamic_shared<float>() + threadIdx.x * kWidth;
  for (unsigned group = 1; group < blockDim.y; ++group) {
    __syncthreads();
    if (threadIdx.y == group) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        write_vector<kWidth, true>(shared + v * blockDim.x * kWidth, values[v]);
    }
    __syncthreads();
    if (threadIdx.y != 0) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float other[kWidth];
      read_vector<kWidth, true>(other, shared + v * blockDim.x * kWidth);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[v][k] += other[k];
    }
  }
}

// Where the columns of vector v of a thread begin.
template <int kWidth>
__device__ int column(int v) {
  return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kWidth;
}

// Adds up what the groups of a block have of the sums over rows, and writes it to the block's row
// of them.
template <int kVectors, int kWidth>
__device__ void store_sums(float* partial, std::int64_t cols, float (&values)[kVectors][kWidth]) {
  if (partial == nullptr) return;
  sum_groups(values);
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = column<kWidth>(v);
    if (c < cols) write_vector<kWidth, true>(partial + blockIdx.x * cols + c, values[v]);
  }
}

// What a thread needs of a row, as it is stored; zeros of a row that is none, which add nothing.
template <int kWidth, int kVectors, bool kAligned, class T>
struct RowPart {
  Loaded<kWidth, kAligned, T> x[kVectors] = {}, dy[kVectors] = {}, residual[kVectors] = {};
  float mean = 0, rstd = 0;

  __device__ RowPart(const BackwardArgs<T>& a, std::int64_t row) {
    if (row >= a.rows) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = column<kWidth>(v);
      if (c >= a.cols) continue;
      x[v] = load_vector<kWidth, kAligned>(a.x + row * a.cols + c);
      dy[v] = load_vector<kWidth, kAligned>(a.dy + row * a.cols + c);
      if (a.residual != nullptr)
        residual[v] = load_vector<kWidth, kAligned>(a.residual + row * a.cols + c);
    }
    if (a.mean != nullptr) mean = a.mean[row];
    rstd = a.rstd[row];
  }
};

// Of rows of which the threads along one keep all, each kVectors of kWidth columns. kAligned: of T;
// the f32 partial sums are.
template <int kWidth, int kVectors, bool kAligned, class T>
__global__ void __launch_bounds__(threads_of<kVectors>, blocks_of_unit<kVectors>)
    backward_kernel(BackwardArgs<T> a) {
  const std::int64_t rows_at_once = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y;
  const auto size = static_cast<float>(a.cols);
  Loaded<kWidth, kAligned, T> w[kVectors] = {};
  float dw[kVectors][kWidth] = {}, dbias[kVectors][kWidth] = {}, dx_sums[kVectors][kWidth] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = column<kWidth>(v);
    if (c < a.cols) w[v] = load_vector<kWidth, kAligned>(a.w + c);
  }

  using Part = RowPart<kWidth, kVectors, kAligned, T>;
  Part next(a, first_row + threadIdx.y);
  unsigned number = 0;  // of the row
  for (std::int64_t base = first_row; base < a.rows; base += rows_at_once, ++number) {
    const Part part = next;
    next = Part(a, base + rows_at_once + threadIdx.y);
    // Made again from what is stored wherever they are needed: registers are short.
    const auto xhat = [&](int v, int k) { return (part.x[v].get(k) - part.mean) * part.rstd; };
    const auto g = [&](int v, int k) { return part.dy[v].get(k) * w[v].get(k); };
    float means[2] = {};  // of g = dy w and of g xhat
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        means[0] += g(v, k);
        means[1] += g(v, k) * xhat(v, k);
        const float d = part.dy[v].get(k);
        dw[v][k] += d * xhat(v, k);
        dbias[v][k] += d;
      }
    }
    if (a.dx == nullptr) continue;
    row_sums(means, number);
    const float g_mean = a.mean != nullptr ? means[0] / size : 0, gx_mean = means[1] / size;
    const std::int64_t row = base + threadIdx.y;
    if (row >= a.rows) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = column<kWidth>(v);
      if (c >= a.cols) continue;
      float out[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        out[k] = part.residual[v].get(k) + part.rstd * (g(v, k) - g_mean - xhat(v, k) * gx_mean);
      }
      write_and_round<kWidth, kAligned>(a.dx + row * a.cols + c, out, a.accumulate);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) dx_sums[v][k] += out[k];
    }
  }
  store_sums(a.dw, a.cols, dw);
  store_sums(a.dbias, a.cols, dbias);
  store_sums(a.dx_sums, a.cols, dx_sums);
}

// Of rows longer than the threads cover at once.
template <int kWidth, bool kAligned, class T>
__global__ void __launch_bounds__(kLongThreads) long_row_kernel(BackwardArgs<T> a) {
  const std::int64_t begin = threadIdx.x * kWidth, step = blockDim.x * kWidth;
  const std::int64_t rows_at_once = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  const auto size = static_cast<float>(a.cols);
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y;
  const std::int64_t partial_row = static_cast<std::int64_t>(blockIdx.x) * a.cols;
  float w_first[kWidth] = {}, dw[1][kWidth] = {}, dbias[1][kWidth] = {}, dx_sums[1][kWidth] = {};
  if (begin < a.cols) read_vector<kWidth, kAligned>(w_first, a.w + begin);

  unsigned number = 0;  // of the row
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
      if (c != begin) read_vector<kWidth, kAligned>(w, a.w + c);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        xhat[k] = (xhat[k] - mean) * rstd;
        if (c == begin) w[k] = w_first[k];
      }
    };

    float means[2] = {};  // of g = dy w and of g xhat
    for (std::int64_t c = begin; c < cols; c += step) {
      float xhat[kWidth], d[kWidth], w[kWidth];
      read(xhat, d, w, c);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        means[0] += d[k] * w[k];
        means[1] += d[k] * w[k] * xhat[k];
        if (c == begin) xhat_first[k] = xhat[k], dy_first[k] = d[k];
      }
    }
    if (a.dx != nullptr) row_sums(means, number++);
    const float g_mean = a.mean != nullptr ? means[0] / size : 0, gx_mean = means[1] / size;

    for (std::int64_t c = begin; c < cols; c += step) {
      float xhat[kWidth], d[kWidth], w[kWidth], out[kWidth] = {};
      if (c == begin) {
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
        if (c == begin) dw[0][k] += xhat[k], dbias[0][k] += d[k], dx_sums[0][k] += out[k];
      }
      if (c != begin) {
        add_partial(a.dw == nullptr ? nullptr : a.dw + partial_row + c, xhat, base == first_row);
        add_partial(a.dbias == nullptr ? nullptr : a.dbias + partial_row + c, d, base == first_row);
        add_partial(a.dx_sums == nullptr ? nullptr : a.dx_sums + partial_row + c, out,
                    base == first_row);
      }
    }
  }
  store_sums(a.dw, a.cols, dw);
  store_sums(a.dbias, a.cols, dbias);
  store_sums(a.dx_sums, a.cols, dx_sums);
}

}  // namespace

Tensor normalize_backward_cuda(const Stream& stream, const Memory& memory, const NormBackward& n) {
  const std::int64_t rows = n.x.shape().rows(), cols = n.x.dim(-1);
  Tensor dx_sums;
  engine::dispatch_float(n.x.dtype(), "normalize", [&](auto t) {
    using T = decltype(t);
    dispatch_width<T>(cols, [&](auto width) {
      constexpr int kWidth = width;
      // How many vectors of a row a lane keeps, or 1 if a block has it, or 0 if nobody keeps it.
      const std::int64_t of_lane = (cols + kWarp * kWidth - 1) / (kWarp * kWidth);
      const std::int64_t vectors = kWidth > 1 && of_lane <= max_vectors<kWidth>
                                       ? std::max<std::int64_t>(of_lane, 2)
                                   : cols <= std::int64_t{threads_of<1>} * kWidth ? 1
                                                                                  : 0;
      const dim3 block = vectors > 1   ? dim3(kWarp, threads_of<2> / kWarp)
                         : vectors > 0 ? block_of(cols, kWidth, threads_of<1>, threads_of<1>)
                                       : block_of(cols, kWidth, kLongThreads, kLongThreads);
      const std::int64_t most = vectors > 1 ? kMaxBlocks / 2 : kMaxBlocks;
      const std::int64_t blocks = std::min((rows + block.y - 1) / block.y, most);
      const auto partials = [&](bool wanted) {
        return wanted ? Tensor::empty(memory, {blocks, cols}, DType::kF32, "normalize.sums",
                                      Category::kWorkspace)
                      : Tensor();
      };
      const Tensor dw = partials(bool(n.dw)), dbias = partials(bool(n.dbias));
      dx_sums = partials(n.dx.wants_column_sums);
      BackwardArgs<T> a{.dy = n.dy.data<T>(),
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
      // What is there already is read ahead, like a residual: each thread reads where it writes.
      if (a.residual == nullptr && std::exchange(a.accumulate, false)) a.residual = a.dx;
      const bool aligned = are_aligned<kWidth>(a.dy, a.x, a.w, a.residual, a.dx);
      const std::int64_t at_once = std::max<std::int64_t>(vectors, 1) * block.x * kWidth;
      const std::size_t shared =
          block.y == 1 ? 0 : static_cast<std::size_t>(at_once) * sizeof(float);
      const auto launch = [&](auto kernel) {
        engine::launch_kernel(
            stream,
            {.grid = dim3(static_cast<unsigned>(blocks)), .block = block, .shared_nbytes = shared},
            kernel, a);
      };
      const auto launch_kept = [&](auto num_vectors) {
        constexpr int kVectors = num_vectors;
        launch(aligned ? backward_kernel<kWidth, kVectors, true, T>
                       : backward_kernel<kWidth, kVectors, false, T>);
      };
      if (vectors == 0) {
        launch(aligned ? long_row_kernel<kWidth, true, T> : long_row_kernel<kWidth, false, T>);
      } else if (vectors == 1) {
        launch_kept(std::integral_constant<int, 1>());
      } else if constexpr (kWidth > 1) {
        if (vectors == 2) launch_kept(std::integral_constant<int, 2>());
        if (vectors == 3) launch_kept(std::integral_constant<int, 3>());
        if constexpr (max_vectors < kWidth >> 3) {
          if (vectors == 4) launch_kept(std::integral_constant<int, 4>());
        }
      }
      if (n.dw) sum_parts_cuda(stream, n.dw, dw);
      if (n.dbias) sum_parts_cuda(stream, n.dbias, dbias);
    });
  });
  return dx_sums;
}

}  // namespace tessera::ops
