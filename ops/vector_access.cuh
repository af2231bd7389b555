// How kernels of ops read and write rows of f32 or bf16: several neighbours a thread, as f32.
// Private to ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "engine/dtype.h"

namespace tessera::ops {

/// Elements of 16 bytes: what one thread moves at once.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

/// Are all of these addresses multiples of kWidth elements? Null is.
template <int kWidth, class... T>
bool are_aligned(const T*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % (sizeof(T) * kWidth) == 0) && ...);
}

namespace internal {

// One access where kAligned, else kWidth of them.
template <class T, int kWidth, bool kAligned>
struct alignas(kAligned ? sizeof(T) * kWidth : alignof(T)) Vector {
  T values[kWidth];
};

}  // namespace internal

/// values = src[0 .. kWidth).
template <int kWidth, bool kAligned, class T>
__device__ void read_vector(float (&values)[kWidth], const T* src) {
  const auto v = *reinterpret_cast<const internal::Vector<T, kWidth, kAligned>*>(src);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = engine::to_f32(v.values[k]);
}

/// dst[0 .. kWidth) = values, or += with `accumulate`. `values` become what dst then holds.
template <int kWidth, bool kAligned, class T>
__device__ void write_and_round(T* dst, float (&values)[kWidth], bool accumulate) {
  auto* out = reinterpret_cast<internal::Vector<T, kWidth, kAligned>*>(dst);
  internal::Vector<T, kWidth, kAligned> v;
  if (accumulate) {
    v = *out;
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      engine::store_f32(v.values[k], engine::to_f32(v.values[k]) + values[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) engine::store_f32(v.values[k], values[k]);
  }
  *out = v;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = engine::to_f32(v.values[k]);
}

/// The same, and `values` are left alone.
template <int kWidth, bool kAligned, class T>
__device__ void write_vector(T* dst, const float (&values)[kWidth], bool accumulate = false) {
  float rounded[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) rounded[k] = values[k];
  write_and_round<kWidth, kAligned>(dst, rounded, accumulate);
}

}  // namespace tessera::ops
