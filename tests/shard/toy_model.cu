#include "engine/cuda_launch.cuh"
#include "tests/shard/toy_model_cuda.h"

namespace tessera::testing {
namespace {

using engine::BFloat16;

__device__ float get(const ToyElements& e, std::int64_t i) {
  return e.dtype == engine::DType::kF32
             ? reinterpret_cast<const float*>(e.data)[i]
             : engine::to_f32(reinterpret_cast<const BFloat16*>(e.data)[i]);
}

__device__ void put(const ToyElements& e, std::int64_t i, float value) {
  if (e.data == nullptr) return;
  if (e.accumulate) value = __fadd_rn(get(e, i), value);
  if (e.dtype == engine::DType::kF32) {
    reinterpret_cast<float*>(e.data)[i] = value;
  } else {
    engine::store_f32(reinterpret_cast<BFloat16*>(e.data)[i], value);
  }
}

__global__ void affine_kernel(float* y, const float* x, ToyElements w, ToyElements b,
                              std::int64_t numel) {
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step()) {
    y[i] = __fadd_rn(__fmul_rn(get(w, i), x[i]), b.data == nullptr ? 0.0f : get(b, i));
  }
}

__global__ void affine_backward_kernel(ToyElements dw, ToyElements db, ToyElements dx,
                                       const float* dy, const float* x, ToyElements w,
                                       std::int64_t numel) {
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step()) {
    const float d = dy[i];
    put(dw, i, __fmul_rn(d, x[i]));
    put(db, i, d);
    put(dx, i, __fmul_rn(d, get(w, i)));
  }
}

// In order, as on the CPU.
__global__ void sum_kernel(float* y, const float* x, std::int64_t numel) {
  float sum = 0;
  for (std::int64_t i = 0; i < numel; ++i) sum = __fadd_rn(sum, x[i]);
  *y = sum;
}

__global__ void sum_backward_kernel(ToyElements dx, const float* dy, std::int64_t numel) {
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step()) {
    put(dx, i, *dy);
  }
}

}  // namespace

void toy_affine_cuda(const engine::Stream& stream, float* y, const float* x, ToyElements w,
                     ToyElements b, std::int64_t numel) {
  engine::launch_kernel(stream, engine::stride_shape(numel), affine_kernel, y, x, w, b, numel);
}

void toy_affine_backward_cuda(const engine::Stream& stream, ToyElements dw, ToyElements db,
                              ToyElements dx, const float* dy, const float* x, ToyElements w,
                              std::int64_t numel) {
  engine::launch_kernel(stream, engine::stride_shape(numel), affine_backward_kernel, dw, db, dx, dy,
                        x, w, numel);
}

void toy_sum_cuda(const engine::Stream& stream, float* y, const float* x, std::int64_t numel) {
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(1)}, sum_kernel, y, x, numel);
}

void toy_sum_backward_cuda(const engine::Stream& stream, ToyElements dx, const float* dy,
                           std::int64_t numel) {
  engine::launch_kernel(stream, engine::stride_shape(numel), sum_backward_kernel, dx, dy, numel);
}

}  // namespace tessera::testing
