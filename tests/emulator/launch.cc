// Launches, checked as the device checks them.
#include <mutex>
#include <string>
#include <utility>

#include "tests/emulator/capture.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
namespace {

constexpr std::size_t kSharedNbytes = 48 << 10;  // without cudaFuncSetAttribute
constexpr int kSharedOptinNbytes = 227 << 10;

bool valid_shape(const dim3& grid, const dim3& block) {
  return grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7FFFFFFF && grid.y <= 65535 &&
         grid.z <= 65535 && block.x >= 1 && block.y >= 1 && block.z >= 1 && block.x <= 1024 &&
         block.y <= 1024 && block.z <= 64 && block.x * block.y * block.z <= 1024;
}

std::size_t max_shared_nbytes(Device& device, const void* kernel) {
  const std::lock_guard lock(runtime().mutex);
  const auto found = device.max_shared_nbytes.find(kernel);
  return found == device.max_shared_nbytes.end() ? kSharedNbytes
                                                 : static_cast<std::size_t>(found->second);
}

}  // namespace

cudaError_t enqueue_kernel(cudaStream_t handle, KernelLaunch launch) {
  const Unseen unseen;
  const char* const illegal_address = std::exchange(host_thread().illegal_address, nullptr);
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = work_error(*stream)) return error;
  if (stream->device != host_thread().device) return failed(cudaErrorInvalidResourceHandle);
  if (!valid_shape(launch.grid, launch.block)) return failed(cudaErrorInvalidConfiguration);
  Runtime& machine = runtime();
  Device& device = machine.devices[stream->device];
  if (launch.shared_nbytes > kSharedNbytes &&
      launch.shared_nbytes > max_shared_nbytes(device, launch.kernel)) {
    return failed(cudaErrorInvalidValue);
  }
  machine.counters.launches.fetch_add(1, std::memory_order_relaxed);

  const int number = stream->device;
  const bool fails = device.launches.fails();
  if (fails || illegal_address != nullptr) {
    const cudaError_t error = fails ? cudaErrorLaunchFailure : cudaErrorIllegalAddress;
    const std::string what = launch.name + ": " + (fails ? "failed on demand" : illegal_address);
    stream->push_work(std::move(launch.name), [=] { break_device(number, error, what); });
    return cudaSuccess;
  }
  std::uint64_t seed = machine.permutation_seed.load(std::memory_order_relaxed);
  if (seed != 0) seed = mix(seed, std::hash<std::string>()(launch.name)) | 1;
  stream->push_work(std::move(launch.name),
                    [run_grid = std::move(launch.run_grid), seed] { run_grid(seed); });
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t handle, std::string name, std::function<void()> fn) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = device_error(stream->device)) return error;
  if (const cudaError_t error = work_error(*stream)) return error;
  runtime().counters.launches.fetch_add(1, std::memory_order_relaxed);
  stream->push_work(std::move(name), std::move(fn));
  return cudaSuccess;
}

}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are CUDA's own names

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (kernel == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      value > kSharedOptinNbytes) {
    return failed(cudaErrorInvalidValue);
  }
  runtime().counters.set_attributes.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(runtime().mutex);
  runtime().devices[host_thread().device].max_shared_nbytes[kernel] = value;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (attributes == nullptr) return failed(cudaErrorInvalidValue);
  if (kernel == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = 90;
  attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes =
      static_cast<int>(max_shared_nbytes(runtime().devices[host_thread().device], kernel));
  return cudaSuccess;
}
