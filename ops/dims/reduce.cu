#include "engine/cuda_launch.cuh"
#include "ops/dims/reduce_cuda.h"
#include "ops/lanes.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::store_f32;
using engine::Stream;
using engine::Tensor;
using engine::to_f32;

namespace {

constexpr int kColumns = 32;  // that a block reduces

struct Columns {
  std::int64_t count, n, inner;

  // First element of a column, whose elements are `inner` apart.
  __device__ std::int64_t begin(std::int64_t column) const {
    return column / inner * n * inner + column % inner;
  }
};

// A thread for each lane of each column. Neighbours of a warp read neighbours in memory: columns,
// or lanes where a column is contiguous.
struct Place {
  int lane, local;
  std::int64_t column;

  __device__ explicit Place(const Columns& columns) {
    const bool is_row = columns.inner == 1;
    lane = static_cast<int>(is_row ? threadIdx.x : threadIdx.y);
    local = static_cast<int>(is_row ? threadIdx.y : threadIdx.x);
    column = std::int64_t{blockIdx.x} * kColumns + local;
  }
};

// The lanes as one, in lane 0 of each column: merge(a, b) takes b into a.
template <class State, class Merge>
__device__ void fold(State (&lanes)[kLanes][kColumns + 1], const Place& place, Merge merge) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (place.lane < half)
      merge(lanes[place.lane][place.local], lanes[place.lane + half][place.local]);
  }
}

template <class Out, class T>
__global__ void __launch_bounds__(kLanes* kColumns)
    sum_kernel(Out* out, const T* x, Columns columns, float divisor, bool accumulate) {
  __shared__ float lanes[kLanes][kColumns + 1];
  const Place place(columns);
  float sum = 0;
  if (place.column < columns.count) {
    const T* const from = x + columns.begin(place.column);
#pragma unroll 4
    for (std::int64_t r = place.lane; r < columns.n; r += kLanes)
      sum += to_f32(from[r * columns.inner]);
  }
  lanes[place.lane][place.local] = sum;
  fold(lanes, place, [](float& a, float b) { a += b; });
  if (place.lane > 0 || place.column >= columns.count) return;
  Out& to = out[place.column];
  const float value = lanes[0][place.local] / divisor;
  store_f32(to, accumulate ? to_f32(to) + value : value);
}

struct Largest {
  float value;
  std::int32_t index;
};

template <class T>
__global__ void __launch_bounds__(kLanes* kColumns)
    max_kernel(T* y, std::int32_t* index, const T* x, Columns columns) {
  __shared__ Largest lanes[kLanes][kColumns + 1];
  const auto take = [](Largest& a, const Largest& b) {
    if (is_before(b.value, b.index, a.value, a.index)) a = b;
  };
  const Place place(columns);
  const bool is_inside = place.column < columns.count;
  const T* const from = x + (is_inside ? columns.begin(place.column) : 0);
  // A lane beyond the last element begins with the first: it comes before none but itself.
  Largest best{to_f32(from[0]), 0};
  for (std::int64_t r = place.lane; r < columns.n; r += kLanes)
    take(best, {to_f32(from[r * columns.inner]), static_cast<std::int32_t>(r)});
  lanes[place.lane][place.local] = best;
  fold(lanes, place, take);
  if (place.lane > 0 || !is_inside) return;
  index[place.column] = lanes[0][place.local].index;
  store_f32(y[place.column], lanes[0][place.local].value);
}

template <class T>
__global__ void max_backward_kernel(T* dx, bool accumulate, const T* dy, const std::int32_t* index,
                                    Columns columns) {
  const std::int64_t numel = columns.count * columns.n;
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step()) {
    const std::int64_t row = i / columns.inner;  // of (outer * n)
    const std::int64_t column = row / columns.n * columns.inner + i % columns.inner;
    if (row % columns.n != index[column]) {
      if (!accumulate) store_f32(dx[i], 0);
    } else {
      const float value = to_f32(dy[column]);
      store_f32(dx[i], accumulate ? to_f32(dx[i]) + value : value);
    }
  }
}

Columns columns_of(const Dim& dim) {
  return {.count = dim.outer * dim.inner, .n = dim.numel, .inner = dim.inner};
}

engine::LaunchShape shape_of(const Columns& columns) {
  return {.grid = dim3(static_cast<unsigned>((columns.count + kColumns - 1) / kColumns)),
          .block = dim3(32, 32)};
}

}  // namespace

void dim_sum_cuda(const Stream& stream, const DimSum& sum) {
  static_assert(kLanes == 32 && kColumns == 32);
  const Columns columns = columns_of(sum.dim);
  engine::dispatch_float(sum.out.dst.dtype(), "sum", [&](auto to) {
    engine::dispatch_float(sum.x.dtype(), "sum", [&](auto from) {
      using Out = decltype(to);
      using T = decltype(from);
      engine::launch_kernel(stream, shape_of(columns), sum_kernel<Out, T>, sum.out.dst.data<Out>(),
                            static_cast<const T*>(sum.x.data<T>()), columns, sum.divisor,
                            sum.out.accumulate);
    });
  });
}

void dim_max_cuda(const Stream& stream, const Tensor& y, const Tensor& index, const Tensor& x,
                  const Dim& dim) {
  const Columns columns = columns_of(dim);
  engine::dispatch_float(x.dtype(), "max", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, shape_of(columns), max_kernel<T>, y.data<T>(),
                          index.data<std::int32_t>(), static_cast<const T*>(x.data<T>()), columns);
  });
}

void dim_max_backward_cuda(const Stream& stream, const GradTarget& dx, const Tensor& dy,
                           const Tensor& index, const Dim& dim) {
  const Columns columns = columns_of(dim);
  engine::dispatch_float(dy.dtype(), "max", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, engine::stride_shape(dx.dst.numel()), max_backward_kernel<T>,
                          dx.dst.data<T>(), dx.accumulate, static_cast<const T*>(dy.data<T>()),
                          static_cast<const std::int32_t*>(index.data<std::int32_t>()), columns);
  });
}

}  // namespace tessera::ops
