#include <cstring>

#include "engine/cuda.h"
#include "engine/cuda_launch.cuh"
#include "engine/elementwise.h"
#include "engine/error.h"

namespace tessera::engine::cuda {
namespace {

constexpr int kPerThread = 8;  // elements: 16 bytes of bf16, 32 of f32

// One thread, kPerThread neighbours: the compiler makes wide accesses of the aligned case.
template <class T, class S, bool kAccumulate, bool kPackable>
__global__ void assign_or_add_kernel(T* dst, const S* src, std::int64_t numel, const float* scale) {
  struct alignas(kPackable ? sizeof(T) * kPerThread : alignof(T)) Dst {
    T values[kPerThread];
  };
  struct alignas(kPackable ? sizeof(S) * kPerThread : alignof(S)) Src {
    S values[kPerThread];
  };
  const float factor = scale != nullptr ? *scale : 1.0f;
  for (std::int64_t i = stride_begin() * kPerThread; i < numel; i += stride_step() * kPerThread) {
    if (i + kPerThread > numel) {
      for (std::int64_t j = i; j < numel; ++j) {
        const float x = to_f32(src[j]) * factor;
        store_f32(dst[j], kAccumulate ? to_f32(dst[j]) + x : x);
      }
      return;
    }
    const Src in = *as_wide<Src>(src + i);
    Dst out;
    if constexpr (kAccumulate) out = *as_wide<Dst>(dst + i);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const float x = to_f32(in.values[k]) * factor;
      store_f32(out.values[k], kAccumulate ? to_f32(out.values[k]) + x : x);
    }
    *as_wide<Dst>(dst + i) = out;
  }
}

template <class T, class S>
void run(const Stream& stream, T* dst, const S* src, std::int64_t numel, bool accumulate,
         const float* scale) {
  const auto is_aligned = [](const auto* p) {
    return reinterpret_cast<std::uintptr_t>(p) % (sizeof(*p) * kPerThread) == 0;
  };
  const bool packable = is_aligned(dst) && is_aligned(src);
  const auto kernel = accumulate ? (packable ? assign_or_add_kernel<T, S, true, true>
                                             : assign_or_add_kernel<T, S, true, false>)
                                 : (packable ? assign_or_add_kernel<T, S, false, true>
                                             : assign_or_add_kernel<T, S, false, false>);
  launch_kernel(stream, stride_shape((numel + kPerThread - 1) / kPerThread), kernel, dst, src,
                numel, scale);
}

template <class T>
__global__ void set_kernel(T* dst, std::int64_t numel, float value) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) store_f32(dst[i], value);
}

struct Stored {
  std::uint64_t words[kMaxStored / sizeof(std::uint64_t)];
};

__global__ void store_kernel(std::uint64_t* dst, Stored data, int num_words) {
  const auto i = static_cast<int>(threadIdx.x);
  if (i < num_words) dst[i] = data.words[i];
}

}  // namespace

void store(const Stream& stream, std::byte* dst, std::span<const std::byte> data) {
  require(data.size() <= kMaxStored && data.size() % sizeof(std::uint64_t) == 0,
          "[cuda] expected at most {} bytes in words of 8, got {}", kMaxStored, data.size());
  Stored stored{};
  std::memcpy(&stored, data.data(), data.size());
  const auto num_words = static_cast<int>(data.size() / sizeof(std::uint64_t));
  launch_kernel(stream, {.grid = dim3(1), .block = dim3(kMaxStored / sizeof(std::uint64_t))},
                store_kernel, reinterpret_cast<std::uint64_t*>(dst), stored, num_words);
}

void set(const Stream& stream, std::byte* dst, DType dtype, std::int64_t numel, float value) {
  dispatch_float(dtype, "set", [&](auto t) {
    using T = decltype(t);
    launch_kernel(stream, stride_shape(numel), set_kernel<T>, reinterpret_cast<T*>(dst), numel,
                  value);
  });
}

void assign_or_add(const Stream& stream, std::byte* dst, DType dst_dtype, const std::byte* src,
                   DType src_dtype, std::int64_t numel, bool accumulate, const float* scale) {
  dispatch_float(dst_dtype, "assign_or_add", [&](auto t) {
    dispatch_float(src_dtype, "assign_or_add", [&](auto s) {
      run(stream, reinterpret_cast<decltype(t)*>(dst), reinterpret_cast<const decltype(s)*>(src),
          numel, accumulate, scale);
    });
  });
}

}  // namespace tessera::engine::cuda
