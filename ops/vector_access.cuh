// How kernels of ops read and write rows of f32 or bf16: several neighbours a thread, as f32.
// Private to ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine/dtype.h"
#include "ops/bf16_pair.cuh"

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

  __device__ float get(int k) const { return engine::to_f32(values[k]); }
  __device__ void set(const float (&x)[kWidth]) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) engine::store_f32(values[k], x[k]);
  }
};

// By words: a compiler that is shown halves of them takes them apart and puts them together, which
// is most of what kernels then do, and may write them one by one.
template <>
struct Vector<engine::BFloat16, 8, true> {
  uint4 words;

  __device__ float get(int k) const {
    const std::uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    return k % 2 == 0 ? low_bf16(pairs[k / 2]) : high_bf16(pairs[k / 2]);
  }
  __device__ void set(const float (&x)[8]) {
    words = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                       pack_bf16(x[6], x[7]));
  }
};

#if !defined(__CUDACC__)
// Not of single elements, which lie where they may: at the call GCC 12 fails under ThreadSanitizer.
template <class Vector, class T>
void check_address(const T* address) {
  if constexpr (alignof(Vector) > alignof(T)) {
    cuda_emulation::check_alignment(address, alignof(Vector));
  }
}
#endif

template <class Vector, class T>
__device__ void load(Vector& to, const T* from) {
#if defined(__CUDACC__)
  to = *reinterpret_cast<const Vector*>(from);
#else
  check_address<Vector>(from);
  std::memcpy(static_cast<void*>(&to), from, sizeof to);
#endif
}

template <class Vector, class T>
__device__ void store(T* to, const Vector& from) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<Vector, internal::Vector<engine::BFloat16, 8, true>>) {
    __stwb(reinterpret_cast<uint4*>(to), from.words);  // else at times word by word
  } else {
    *reinterpret_cast<Vector*>(to) = from;
  }
#else
  check_address<Vector>(to);
  std::memcpy(static_cast<void*>(to), &from, sizeof from);
#endif
}

}  // namespace internal

/// Elements as they are stored, on their way: they take half of the registers if they are bf16.
template <int kWidth, bool kAligned, class T>
using Loaded = internal::Vector<T, kWidth, kAligned>;

/// src[0 .. kWidth).
template <int kWidth, bool kAligned, class T>
__device__ Loaded<kWidth, kAligned, T> load_vector(const T* src) {
  Loaded<kWidth, kAligned, T> v;
  internal::load(v, src);
  return v;
}

/// values = src[0 .. kWidth).
template <int kWidth, bool kAligned, class T>
__device__ void read_vector(float (&values)[kWidth], const T* src) {
  const auto v = load_vector<kWidth, kAligned>(src);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = v.get(k);
}

/// dst[0 .. kWidth) = values, or += with `accumulate`. `values` become what dst then holds.
template <int kWidth, bool kAligned, class T>
__device__ void write_and_round(T* dst, float (&values)[kWidth], bool accumulate) {
  Loaded<kWidth, kAligned, T> v;
  if (accumulate) {
    v = load_vector<kWidth, kAligned>(dst);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = v.get(k) + values[k];
  }
  v.set(values);
  internal::store(dst, v);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = v.get(k);
}

/// write_and_round() that leaves `values` alone.
template <int kWidth, bool kAligned, class T>
__device__ void write_vector(T* dst, const float (&values)[kWidth], bool accumulate = false) {
  float rounded[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) rounded[k] = values[k];
  write_and_round<kWidth, kAligned>(dst, rounded, accumulate);
}

}  // namespace tessera::ops
