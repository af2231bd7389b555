#include <algorithm>
#include <cstdint>
#include <limits>

#include "engine/cuda.h"
#include "engine/cuda_launch.cuh"
#include "ops/embedding_cuda.h"
#include "ops/vector_access.cuh"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Memory;
using engine::Stream;
using engine::Tensor;

// [Note: gradient of a table, in order]
// A row of the table sums its rows of dy in the order of their positions, as the CPU does, so the
// positions of each token have to be brought into order. Four small kernels do that:
//
//   count      how often each token occurs, by atomic additions of integers;
//   allocate   each token gets a bucket of that size somewhere in one array;
//   place      each position goes into the bucket of its token, at whatever place is next;
//   rank       each position counts the smaller ones of its bucket: its place in the final order.
//
// Where a bucket lies and how `place` fills it depends on the order of atomics; its content, and so
// the ranks and the sums, do not. A bucket of n positions takes n^2 comparisons, all over the GPU:
// for text it is nothing, and even when all of 64 Ki tokens are the same it takes less time than
// the one sum they all go into. That sum is a chain, so a warp reads kBatch rows ahead of it.

namespace {

constexpr int kWarp = 32;

// One block a token.
template <int kWidth, bool kAligned, class T>
__global__ void look_up_kernel(T* y, const std::int32_t* tokens, const T* table,
                               std::int64_t num_rows, std::int64_t width, const T* positions,
                               std::int64_t num_positions) {
  const std::int64_t i = blockIdx.x, token = tokens[i];
  const bool known = token >= 0 && token < num_rows;
  for (std::int64_t c = threadIdx.x * kWidth; c < width; c += blockDim.x * kWidth) {
    float row[kWidth];
    if (known) {
      read_vector<kWidth, kAligned>(row, table + token * width + c);
    } else {
#pragma unroll
      for (float& value : row) value = std::numeric_limits<float>::quiet_NaN();
    }
    if (positions != nullptr) {
      float position[kWidth];
      read_vector<kWidth, kAligned>(position, positions + i % num_positions * width + c);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) row[k] += position[k];
    }
    write_vector<kWidth, kAligned>(y + i * width + c, row);
  }
}

// The positions of each token: counts[v] of them at order[ends[v] - counts[v]].
struct TokenRows {
  const std::int32_t* counts;
  const std::int32_t* ends;
  const std::int32_t* order;

  __device__ std::int64_t count(std::int64_t v) const { return counts[v]; }
  __device__ std::int64_t row(std::int64_t v, std::int64_t k) const {
    return order[ends[v] - counts[v] + k];
  }
};

// Rows v, v + num_tokens, ... of dy.
struct PositionRows {
  std::int64_t num_tokens;
  std::int64_t batch;

  __device__ std::int64_t count(std::int64_t v) const { return v < num_tokens ? batch : 0; }
  __device__ std::int64_t row(std::int64_t v, std::int64_t k) const { return v + k * num_tokens; }
};

// Adds rows k, k + 1, ... of v while there are kBatch more; returns the first left.
template <int kBatch, int kWidth, bool kAligned, class Rows, class T>
__device__ std::int64_t add_rows(float (&sum)[kWidth], const T* dy, std::int64_t width,
                                 const Rows& rows, std::int64_t v, std::int64_t k,
                                 std::int64_t count) {
  for (; k + kBatch <= count; k += kBatch) {
    float values[kBatch][kWidth];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      read_vector<kWidth, kAligned>(values[b], dy + rows.row(v, k + b) * width);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += values[b][j];
    }
  }
  return k;
}

// One warp a row of grad and stretch of kWarp * kWidth columns.
template <int kWidth, bool kAligned, class Rows, class G, class T>
__global__ void __launch_bounds__(256)
    sum_rows_kernel(G* grad, bool accumulate, std::int64_t num_rows, std::int64_t width,
                    const T* dy, Rows rows) {
  const std::int64_t stretches = (width + kWarp * kWidth - 1) / (kWarp * kWidth);
  const std::int64_t num_warps = engine::stride_step() / kWarp;
  for (std::int64_t unit = engine::stride_begin() / kWarp; unit < num_rows * stretches;
       unit += num_warps) {
    const std::int64_t v = unit / stretches, count = rows.count(v);
    const std::int64_t c = (unit % stretches * kWarp + threadIdx.x % kWarp) * kWidth;
    if (c >= width || (accumulate && count == 0)) continue;
    float sum[kWidth] = {};
    if (accumulate) read_vector<kWidth, kAligned>(sum, grad + v * width + c);
    std::int64_t k = 0;
    k = add_rows<16, kWidth, kAligned>(sum, dy + c, width, rows, v, k, count);
    k = add_rows<4, kWidth, kAligned>(sum, dy + c, width, rows, v, k, count);
    add_rows<1, kWidth, kAligned>(sum, dy + c, width, rows, v, k, count);
    write_vector<kWidth, kAligned>(grad + v * width + c, sum);
  }
}

__global__ void count_kernel(std::int32_t* counts, std::int32_t num_rows,
                             const std::int32_t* tokens, std::int64_t num_tokens) {
  for (std::int64_t i = engine::stride_begin(); i < num_tokens; i += engine::stride_step()) {
    const std::int32_t token = tokens[i];
    if (token >= 0 && token < num_rows) atomicAdd(&counts[token], 1);
  }
}

// begins[v] = where the bucket of v begins; *used grows to the sum of all counts. One thread a row:
// a warp adds up its counts, so that one atomic does for them.
__global__ void allocate_kernel(std::int32_t* begins, const std::int32_t* counts,
                                std::int32_t num_rows, std::int32_t* used) {
  const std::int64_t v = engine::stride_begin();
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int32_t count = v < num_rows ? counts[v] : 0;
  std::int32_t end = count;  // of this bucket among those of the warp
  for (int step = 1; step < kWarp; step *= 2) {
    const std::int32_t before = __shfl_up_sync(0xFFFFFFFFu, end, static_cast<unsigned>(step));
    if (lane >= step) end += before;
  }
  std::int32_t base = 0;
  if (lane == kWarp - 1) base = atomicAdd(used, end);
  base = __shfl_sync(0xFFFFFFFFu, base, kWarp - 1);
  if (v < num_rows) begins[v] = base + end - count;
}

// Moves each ends[v] from the beginning of its bucket to the end.
__global__ void place_kernel(std::int32_t* placed, std::int32_t* ends, std::int32_t num_rows,
                             const std::int32_t* tokens, std::int64_t num_tokens) {
  for (std::int64_t i = engine::stride_begin(); i < num_tokens; i += engine::stride_step()) {
    const std::int32_t token = tokens[i];
    if (token >= 0 && token < num_rows)
      placed[atomicAdd(&ends[token], 1)] = static_cast<std::int32_t>(i);
  }
}

__global__ void rank_kernel(std::int32_t* order, const std::int32_t* placed,
                            const std::int32_t* used, const std::int32_t* counts,
                            const std::int32_t* ends, const std::int32_t* tokens) {
  for (std::int64_t slot = engine::stride_begin(); slot < *used; slot += engine::stride_step()) {
    const std::int32_t i = placed[slot], token = tokens[i];
    const std::int32_t end = ends[token], begin = end - counts[token];
    std::int32_t rank = 0;
#pragma unroll 8
    for (std::int32_t s = begin; s < end; ++s) rank += placed[s] < i ? 1 : 0;
    order[begin + rank] = i;
  }
}

template <class Rows>
void sum_rows(const Stream& stream, const GradTarget& grad, const Tensor& dy, const Rows& rows) {
  const std::int64_t num_rows = grad.dst.dim(0), width = grad.dst.dim(1);
  engine::dispatch_float(grad.dst.dtype(), "embedding", [&](auto g) {
    engine::dispatch_float(dy.dtype(), "embedding", [&](auto t) {
      using G = decltype(g);
      using T = decltype(t);
      constexpr int kWidth = 4;
      G* dst = grad.dst.data<G>();
      const T* src = dy.data<T>();
      const bool wide = width % kWidth == 0 && are_aligned<kWidth>(dst) && are_aligned<kWidth>(src);
      const std::int64_t stretch = kWarp * (wide ? kWidth : 1);
      const std::int64_t num_warps = num_rows * ((width + stretch - 1) / stretch);
      engine::launch_kernel(
          stream, engine::stride_shape(num_warps * kWarp),
          wide ? sum_rows_kernel<kWidth, true, Rows, G, T> : sum_rows_kernel<1, false, Rows, G, T>,
          dst, grad.accumulate, num_rows, width, src, rows);
    });
  });
}

}  // namespace

void embedding_forward_cuda(const Stream& stream, const Tensor& y, const Tensor& tokens,
                            const Tensor& table, const Tensor& positions) {
  const std::int64_t width = table.dim(1);
  engine::dispatch_float(y.dtype(), "embedding", [&](auto t) {
    using T = decltype(t);
    constexpr int kWidth = kVectorWidth<T>;
    const T* position_rows = positions.defined() ? positions.data<T>() : nullptr;
    const bool wide =
        width % kWidth == 0 && are_aligned<kWidth>(y.data<T>(), table.data<T>(), position_rows);
    const std::int64_t units = wide ? width / kWidth : width;
    const std::int64_t threads = std::clamp<std::int64_t>((units + 31) / 32 * 32, 32, 256);
    engine::launch_kernel(stream,
                          {.grid = dim3(static_cast<unsigned>(tokens.numel())),
                           .block = dim3(static_cast<unsigned>(threads))},
                          wide ? look_up_kernel<kWidth, true, T> : look_up_kernel<1, false, T>,
                          y.data<T>(), tokens.data<std::int32_t>(), table.data<T>(), table.dim(0),
                          width, position_rows,
                          positions.defined() ? tokens.dim(-1) : std::int64_t{1});
  });
}

void embedding_backward_cuda(const Stream& stream, const Memory& memory, const GradTarget& grad,
                             const Tensor& dy, const Tensor& tokens) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  const std::int64_t num_rows = grad.dst.dim(0), num_tokens = tokens.numel();
  engine::require(num_rows <= kMax && num_tokens <= kMax,
                  "[embedding] expected fewer than 2^31 rows and tokens, got {} and {} ({})",
                  num_rows, num_tokens, tokens.name());
  const Tensor workspace = Tensor::empty(memory, {2 * num_rows + 1 + 2 * num_tokens}, DType::kI32,
                                         "embedding.order", Category::kWorkspace);
  auto* counts = workspace.data<std::int32_t>();
  std::int32_t* used = counts + num_rows;
  std::int32_t* ends = used + 1;
  std::int32_t* placed = ends + num_rows;
  std::int32_t* order = placed + num_tokens;
  const auto* ids = tokens.data<std::int32_t>();
  const auto rows = static_cast<std::int32_t>(num_rows);
  const engine::LaunchShape shape = engine::stride_shape(num_tokens);
  engine::cuda::fill(stream, workspace.raw(), 0,
                     (num_rows + 1) * static_cast<std::int64_t>(sizeof(std::int32_t)));
  engine::launch_kernel(stream, shape, count_kernel, counts, rows, ids, num_tokens);
  engine::launch_kernel(
      stream, {.grid = dim3(static_cast<unsigned>((num_rows + 255) / 256)), .block = dim3(256)},
      allocate_kernel, ends, counts, rows, used);
  engine::launch_kernel(stream, shape, place_kernel, placed, ends, rows, ids, num_tokens);
  engine::launch_kernel(stream, shape, rank_kernel, order, placed, used, counts, ends, ids);
  sum_rows(stream, grad, dy, TokenRows{counts, ends, order});
}

void position_embedding_backward_cuda(const Stream& stream, const GradTarget& grad,
                                      const Tensor& dy, std::int64_t num_tokens) {
  const std::int64_t batch = num_tokens == 0 ? 0 : dy.shape().rows() / num_tokens;
  sum_rows(stream, grad, dy, PositionRows{num_tokens, batch});
}

}  // namespace tessera::ops
