// Devices, their properties, and errors.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "tests/emulator/capture.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
namespace {

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled",
     "peer access has not been enabled"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

const ErrorText* find_error(cudaError_t error) {
  const auto* found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                   [&](const ErrorText& e) { return e.error == error; });
  return found == std::end(kErrors) ? nullptr : found;
}

bool exists(int device) { return device >= 0 && device < runtime().num_devices.load(); }

/// Of its current device to the calling thread.
void give_context() {
  host_thread().has_context = true;
  runtime().devices[host_thread().device].has_context.store(true, std::memory_order_relaxed);
}

/// -1: not known to the emulation.
int attribute_of(cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrComputeCapabilityMajor:
      return runtime().compute_capability.load() / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return runtime().compute_capability.load() % 10;
    case cudaDevAttrMaxGridDimX:
      return 0x7FFFFFFF;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 227 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 228 << 10;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return 1 << 10;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrL2CacheSize:
      return 50 << 20;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrClockRate:
      return 1'980'000;
    case cudaDevAttrMemoryClockRate:
      return 2'619'000;
    case cudaDevAttrAsyncEngineCount:
      return 3;
    case cudaDevAttrPciBusId:
      return device + 1;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrIntegrated:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrComputeMode:
      return 0;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrEccEnabled:
    case cudaDevAttrCooperativeLaunch:
      return 1;
    default:
      return -1;
  }
}

}  // namespace

cudaError_t failed(cudaError_t error) { return host_thread().last_error = error; }

cudaError_t entry_error(int device) {
  const cudaError_t error = device_error(device);
  if (error != cudaErrorNoDevice && error != cudaErrorNotPermitted) give_context();
  return error;
}

cudaError_t wait_error(int device) {
  const cudaError_t error = entry_error(device);
  const bool is_sticky = error != cudaErrorNoDevice && error != cudaErrorNotPermitted;
  return is_sticky ? cudaSuccess : error;
}

cudaError_t device_error(int device) {
  Runtime& machine = runtime();
  if (machine.num_devices.load(std::memory_order_relaxed) == 0) return failed(cudaErrorNoDevice);
  if (host_thread().in_host_function) return failed(cudaErrorNotPermitted);
  { const std::lock_guard lock(machine.devices[device].context_lock); }
  const int sticky = machine.devices[device].sticky.load(std::memory_order_relaxed);
  return sticky == 0 ? cudaSuccess : failed(static_cast<cudaError_t>(sticky));
}

void break_device(int device, cudaError_t error, const std::string& what) {
  const Unseen unseen;
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  Device& broken = machine.devices[device];
  fprintf(stderr, "cuda_emulation: device %d, stream %s: %s\n", device,
          current_work().stream == nullptr ? "none" : current_work().stream, what.c_str());
  if (broken.sticky.load() != 0) return;
  broken.fault = what;
  broken.sticky.store(error);
}

}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are CUDA's own names

cudaError_t cudaGetDeviceCount(int* count) {
  const Unseen unseen;
  if (count == nullptr) return failed(cudaErrorInvalidValue);
  *count = runtime().num_devices.load();
  return *count == 0 ? failed(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const Unseen unseen;
  if (!exists(device)) {
    return failed(runtime().num_devices.load() == 0 ? cudaErrorNoDevice : cudaErrorInvalidDevice);
  }
  host_thread().device = device;
  give_context();
  runtime().counters.set_devices.fetch_add(1, std::memory_order_relaxed);
  if (host_thread().label.empty()) host_thread().set_label("device" + std::to_string(device));
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  const Unseen unseen;
  if (device == nullptr) return failed(cudaErrorInvalidValue);
  if (runtime().num_devices.load() == 0) return failed(cudaErrorNoDevice);
  *device = host_thread().device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const Unseen unseen;
  if (properties == nullptr) return failed(cudaErrorInvalidValue);
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  *properties = {};
  const auto attribute = [&](cudaDeviceAttr of) { return attribute_of(of, device); };
  snprintf(properties->name, sizeof properties->name, "Emulated sm_90");
  std::fill(std::begin(properties->uuid.bytes), std::end(properties->uuid.bytes), '\0');
  properties->uuid.bytes[15] = static_cast<char>(device + 1);
  properties->totalGlobalMem = runtime().memory_nbytes.load();
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->reservedSharedMemPerBlock = 1 << 10;
  properties->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->warpSize = 32;
  properties->memPitch = 0x7FFFFFFF;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7FFFFFFF;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->totalConstMem = 64 << 10;
  properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  properties->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  properties->pciBusID = attribute(cudaDevAttrPciBusId);
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->canMapHostMemory = 1;
  properties->streamPrioritiesSupported = 1;
  properties->ECCEnabled = 1;
  properties->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const Unseen unseen;
  if (value == nullptr) return failed(cudaErrorInvalidValue);
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  const int found = attribute_of(attribute, device);
  if (found < 0) {
    fprintf(stderr, "cuda_emulation: device attribute %d is not emulated\n", attribute);
    return failed(cudaErrorInvalidValue);
  }
  *value = found;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int nbytes, int device) {
  const Unseen unseen;
  if (text == nullptr || nbytes < 13) return failed(cudaErrorInvalidValue);
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  snprintf(text, static_cast<std::size_t>(nbytes), "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const Unseen unseen;
  if (can == nullptr) return failed(cudaErrorInvalidValue);
  if (!exists(device) || !exists(peer)) return failed(cudaErrorInvalidDevice);
  *can = device == peer ? 0 : 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (flags != 0) return failed(cudaErrorInvalidValue);
  const int device = host_thread().device;
  if (!exists(peer) || peer == device) return failed(cudaErrorInvalidDevice);
  const bool was = runtime().devices[device].peer_enabled[peer].exchange(true);
  return was ? failed(cudaErrorPeerAccessAlreadyEnabled) : cudaSuccess;
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (!exists(peer)) return failed(cudaErrorInvalidDevice);
  const bool was = runtime().devices[host_thread().device].peer_enabled[peer].exchange(false);
  return was ? cudaSuccess : failed(cudaErrorPeerAccessNotEnabled);
}

cudaError_t cudaDeviceSynchronize() {
  const Unseen unseen;
  const int device = host_thread().device;
  if (const cudaError_t error = wait_error(device)) return error;
  if (const cudaError_t error = unsafe_error()) return error;
  count_blocking();
  for (const std::shared_ptr<Stream>& stream : streams_of(device)) block_on(*stream);
  return entry_error(device);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  const Unseen unseen;
  if (version == nullptr) return failed(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaPeekAtLastError() {
  const Unseen unseen;
  const int sticky = runtime().devices[host_thread().device].sticky.load();
  return sticky != 0 ? static_cast<cudaError_t>(sticky) : host_thread().last_error;
}

cudaError_t cudaGetLastError() {
  const Unseen unseen;
  const cudaError_t last = cudaPeekAtLastError();
  host_thread().last_error = cudaSuccess;
  return last;
}

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* found = find_error(error);
  return found == nullptr ? "unrecognized error code" : found->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* found = find_error(error);
  return found == nullptr ? "unrecognized error code" : found->text;
}
