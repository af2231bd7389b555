// The one place that starts kernels, and what kernels share. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <type_traits>
#include <utility>

#include "engine/cuda_check.h"
#include "engine/dtype.h"
#include "engine/stream.h"

namespace tessera::engine {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_nbytes = 0;  ///< dynamic, per block
};

inline cudaStream_t cuda_stream(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.native());
}

/// Dynamic shared memory that kernels may use, as far as a stream knows: so that it asks for each
/// kernel once, and not at each launch. What CUDA lets a kernel use is the last request of any
/// stream: so one that needs more than 48 KiB must always need the same.
class SharedMemoryLimits {
 public:
  explicit SharedMemoryLimits(const Stream&) {}
  /// Lets `kernel` use `nbytes` on the current GPU.
  void raise(const void* kernel, std::size_t nbytes) {
    std::size_t& limit = limits_[kernel];
    if (nbytes <= limit) return;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(nbytes)),
               "cudaFuncSetAttribute");
    limit = nbytes;
  }

 private:
  std::map<const void*, std::size_t> limits_;
};

/// Starts `kernel` on a CUDA stream, inside the function given to Stream::launch(), which states
/// the work and makes its GPU current. An empty grid is no launch, and a meta device starts
/// nothing. Throws DeviceError.
template <class... Params, class... Args>
void launch_kernel(const Stream& stream, const LaunchShape& shape, void (*kernel)(Params...),
                   Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  if (stream.device().is_meta) return;
  constexpr std::size_t kSharedByDefault = 48 << 10;
  if (shape.shared_nbytes > kSharedByDefault)
    stream.state<SharedMemoryLimits>().raise(reinterpret_cast<const void*>(kernel),
                                             shape.shared_nbytes);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_nbytes;
  config.stream = cuda_stream(stream);
#if defined(__CUDACC__)
  check_cuda(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "a kernel launch");
#else
  check_cuda(cuda_emulation::launch_kernel(config, kernel, std::forward<Args>(args)...),
             "a kernel launch");
#endif
}

/// The block's dynamic shared memory, 32-byte aligned: Packed and eight f32 can lie in it.
template <class T>
__device__ T* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(32) unsigned char tessera_dynamic_shared[];
  return reinterpret_cast<T*>(tessera_dynamic_shared);
#else
  return static_cast<T*>(cuda_emulation::dynamic_shared_memory());
#endif
}

/// `address` as that of a Wide, which has to lie where a GPU can move one: the emulated device sees
/// to that.
template <class Wide, class T>
__device__ auto* as_wide(T* address) {
#if !defined(__CUDACC__)
  cuda_emulation::check_alignment(address, alignof(Wide));
#endif
  return reinterpret_cast<std::conditional_t<std::is_const_v<T>, const Wide, Wide>*>(address);
}

/// 16 bytes of T, moved by one instruction. The address must be 16-byte aligned.
template <class T>
struct alignas(16) Packed {
  static constexpr int kNumel = 16 / static_cast<int>(sizeof(T));
  T values[kNumel];

  __device__ static Packed load(const T* src) { return *as_wide<Packed>(src); }
  __device__ void store(T* dst) const { *as_wide<Packed>(dst) = *this; }
};

/// May all of these addresses be used with Packed?
template <class... T>
bool are_packable(const T*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

/// Blocks for `count` items, in a grid-stride loop: enough to fill any GPU. The emulated device has
/// few threads, so that loops go round for the little work of a test.
inline LaunchShape stride_shape(std::int64_t count) {
#if defined(__CUDACC__)
  constexpr std::int64_t kThreads = 256, kMaxBlocks = 4096;
#else
  constexpr std::int64_t kThreads = 64, kMaxBlocks = 2;
#endif
  const std::int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMaxBlocks);
  return {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(static_cast<unsigned>(kThreads))};
}

/// First item of this thread in a grid-stride loop, and the step.
__device__ inline std::int64_t stride_begin() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t stride_step() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

}  // namespace tessera::engine
