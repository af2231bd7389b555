#include "engine/cuda_launch.cuh"
#include "ops/dispatch_cuda.h"

namespace tessera::ops {

using engine::Stream;

namespace {

template <class T>
__global__ void scatter_kernel(ExpertRows<T> rows, const T* x, const float* gates) {
  for (std::int64_t at = engine::stride_begin(); at < rows.num_tokens * rows.width;
       at += engine::stride_step()) {
    const std::int64_t n = at / rows.width, c = at % rows.width;
    for (std::int64_t i = n * rows.k; i < (n + 1) * rows.k; ++i)
      rows.write(i, c, engine::to_f32(x[at]) * (gates == nullptr ? 1.0f : gates[i]));
  }
}

template <class T>
__global__ void gather_kernel(ExpertRows<T> rows, T* y, const float* gates, bool accumulate) {
  for (std::int64_t at = engine::stride_begin(); at < rows.num_tokens * rows.width;
       at += engine::stride_step()) {
    const float value = rows.sum(gates, at / rows.width, at % rows.width);
    engine::store_f32(y[at], accumulate ? engine::to_f32(y[at]) + value : value);
  }
}

template <class T>
__global__ void dot_kernel(ExpertRows<T> rows, const T* dy, float* dgates, bool accumulate) {
  for (std::int64_t i = engine::stride_begin(); i < rows.num_tokens * rows.k;
       i += engine::stride_step()) {
    dgates[i] = accumulate ? dgates[i] + rows.dot(dy, i) : rows.dot(dy, i);
  }
}

}  // namespace

template <class T>
void scatter_rows_cuda(const Stream& stream, const ExpertRows<T>& rows, const T* x,
                       const float* gates) {
  engine::launch_kernel(stream, engine::stride_shape(rows.num_tokens * rows.width),
                        scatter_kernel<T>, rows, x, gates);
}

template <class T>
void gather_rows_cuda(const Stream& stream, const ExpertRows<T>& rows, T* y, const float* gates,
                      bool accumulate) {
  engine::launch_kernel(stream, engine::stride_shape(rows.num_tokens * rows.width),
                        gather_kernel<T>, rows, y, gates, accumulate);
}

template <class T>
void dot_rows_cuda(const Stream& stream, const ExpertRows<T>& rows, const T* dy, float* dgates,
                   bool accumulate) {
  engine::launch_kernel(stream, engine::stride_shape(rows.num_tokens * rows.k), dot_kernel<T>, rows,
                        dy, dgates, accumulate);
}

using F = float;
using B = engine::BFloat16;
template void scatter_rows_cuda(const Stream&, const ExpertRows<F>&, const F*, const float*);
template void scatter_rows_cuda(const Stream&, const ExpertRows<B>&, const B*, const float*);
template void gather_rows_cuda(const Stream&, const ExpertRows<F>&, F*, const float*, bool);
template void gather_rows_cuda(const Stream&, const ExpertRows<B>&, B*, const float*, bool);
template void dot_rows_cuda(const Stream&, const ExpertRows<F>&, const F*, float*, bool);
template void dot_rows_cuda(const Stream&, const ExpertRows<B>&, const B*, float*, bool);

}  // namespace tessera::ops
