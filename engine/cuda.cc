#include "engine/cuda.h"

#include <cuda.h>
#include <fmt/format.h>

#include "engine/cuda_check.h"
#include "engine/error.h"

namespace tessera::engine {

void* find_driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  check_cuda(status, fmt::format("cudaGetDriverEntryPoint of {}", name));
  require<DeviceError>(result == cudaDriverEntryPointSuccess && found != nullptr,
                       "[cuda] expected a driver with {}, got none", name);
  return found;
}

namespace {

// Has the calling thread chosen or used a GPU?
bool has_context() {
  using GetCurrent = CUresult (*)(CUcontext*);
  static const auto kGetCurrent =
      reinterpret_cast<GetCurrent>(find_driver_function("cuCtxGetCurrent"));
  CUcontext context = nullptr;
  return kGetCurrent(&context) == CUDA_SUCCESS && context != nullptr;
}

}  // namespace

CurrentGpu::CurrentGpu(int index) {
  int before = 0;
  check_cuda(cudaGetDevice(&before), "cudaGetDevice");
  if (before == index) return;
  const bool was_chosen = has_context();
  check_cuda(cudaSetDevice(index), "cudaSetDevice");
  if (was_chosen) before_ = before;
}

CurrentGpu::~CurrentGpu() {
  if (before_ >= 0) (void)cudaSetDevice(before_);
}

namespace cuda {
namespace {

// While one lives, what CUDA takes for unsafe while this thread captures is allowed: to ask for
// memory, which is not part of what is captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

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
  const RelaxedCapture relaxed;
  void* data = nullptr;
  const auto size = static_cast<std::size_t>(nbytes);
  const cudaError_t status =
      device.is_cuda() ? cudaMalloc(&data, size) : cudaMallocHost(&data, size);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  if (status != cudaSuccess)
    check_cuda(status, fmt::format("an allocation of {} bytes on {}", nbytes, to_string(device)));
  return static_cast<std::byte*>(data);
}

void deallocate(const Device& device, std::byte* data) noexcept {
  on_gpu_quietly(device.index,
                 [&] { (void)(device.is_cuda() ? cudaFree(data) : cudaFreeHost(data)); });
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

}  // namespace cuda
}  // namespace tessera::engine
