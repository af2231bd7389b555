#include "engine/cuda.h"

#include <fmt/format.h>

#include "engine/cuda_check.h"
#include "engine/error.h"

namespace tessera::engine::cuda {
namespace {

cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.native()); }

void check(cudaError_t status, std::string_view call, const Stream& stream) {
  if (status == cudaSuccess) return;
  check_cuda(status, fmt::format("{} on {}", call, to_string(stream.device())));
}

}  // namespace

int num_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    return 0;
  }
  check_cuda(status, "cudaGetDeviceCount");
  return count;
}

std::byte* allocate(const Device& device, std::int64_t nbytes) {
  const CurrentGpu current(device.index);
  void* data = nullptr;
  const auto size = static_cast<std::size_t>(nbytes);
  const cudaError_t status =
      device.is_cuda() ? cudaMalloc(&data, size) : cudaMallocHost(&data, size);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  check_cuda(status, fmt::format("an allocation of {} bytes on {}", nbytes, to_string(device)));
  return static_cast<std::byte*>(data);
}

void deallocate(const Device& device, std::byte* data) noexcept {
  // After a sticky error nothing can be freed, and nobody can be told.
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) return;
  if (before != device.index) (void)cudaSetDevice(device.index);
  (void)(device.is_cuda() ? cudaFree(data) : cudaFreeHost(data));
  if (before != device.index) (void)cudaSetDevice(before);
}

void fill(const Stream& stream, std::byte* dst, int byte, std::int64_t nbytes) {
  if (nbytes == 0 || stream.device().is_meta) return;
  const CurrentGpu current(stream.device().index);
  check(cudaMemsetAsync(dst, byte, static_cast<std::size_t>(nbytes), native(stream)),
        "cudaMemsetAsync", stream);
}

void copy(const Stream& stream, std::byte* dst, const std::byte* src, std::int64_t nbytes) {
  if (nbytes == 0 || stream.device().is_meta) return;
  const CurrentGpu current(stream.device().index);
  check(cudaMemcpyAsync(dst, src, static_cast<std::size_t>(nbytes), cudaMemcpyDefault,
                        native(stream)),
        "cudaMemcpyAsync", stream);
}

}  // namespace tessera::engine::cuda
