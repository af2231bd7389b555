// Copies and fills. What blocks and what is staged follows "API synchronization behavior" of the
// CUDA runtime's manual.
#include <cstring>
#include <memory>
#include <optional>

#include "tests/emulator/arena.h"
#include "tests/emulator/capture.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
namespace {

enum class Place { kPageable, kPinned, kDevice, kInvalid };

Place place_of(const void* pointer, std::size_t nbytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (device_arena().contains(address)) {
    return device_arena().containing(address, nbytes) ? Place::kDevice : Place::kInvalid;
  }
  if (pinned_arena().contains(address)) {
    return pinned_arena().containing(address, nbytes) ? Place::kPinned : Place::kInvalid;
  }
  if (device_arena().stores(address) || pointer == nullptr) return Place::kInvalid;
  return Place::kPageable;
}

bool matches(cudaMemcpyKind kind, Place dst, Place src) {
  const bool to_device = dst == Place::kDevice;
  const bool from_device = src == Place::kDevice;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

/// `synchronous`: cudaMemcpy.
cudaError_t copy(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind,
                 Stream& stream, bool synchronous) {
  if (nbytes == 0) return cudaSuccess;
  const Place to = place_of(dst, nbytes);
  const Place from = place_of(src, nbytes);
  if (to == Place::kInvalid || from == Place::kInvalid) return failed(cudaErrorInvalidValue);
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return failed(cudaErrorInvalidMemcpyDirection);
  }
  if (!matches(kind, to, from)) return failed(cudaErrorInvalidValue);
  if (to == Place::kPageable || from == Place::kPageable) {  // a graph would read it when it runs
    if (const cudaError_t error = uncapturable_error(stream)) return error;
  }
  Counters& counters = runtime().counters;
  counters.copies.fetch_add(1, std::memory_order_relaxed);

  void* target = storage_of(dst);
  if (from == Place::kPageable && to == Place::kDevice) {
    if (synchronous) {
      count_blocking();
      block_on(stream);
    }
    const Seen seen;
    const std::shared_ptr<char[]> staged(new char[nbytes]);
    std::memcpy(staged.get(), src, nbytes);
    stream.push_work("copy", [=] { std::memcpy(target, staged.get(), nbytes); });
  } else {
    const void* source = storage_of(src);
    stream.push_work("copy", [=] { std::memmove(target, source, nbytes); });
    const bool on_device = to == Place::kDevice && from == Place::kDevice;
    const bool on_host = to != Place::kDevice && from != Place::kDevice;
    if (capture_of(stream) != nullptr) return cudaSuccess;
    if ((synchronous && !on_device) || to == Place::kPageable || on_host) {
      count_blocking();
      block_on(stream);
      return entry_error(stream.device);
    }
  }
  return cudaSuccess;
}

cudaError_t fill(void* dst, int value, std::size_t nbytes, Stream& stream) {
  if (nbytes == 0) return cudaSuccess;
  const Place place = place_of(dst, nbytes);
  if (place != Place::kDevice && place != Place::kPinned) return failed(cudaErrorInvalidValue);
  runtime().counters.copies.fetch_add(1, std::memory_order_relaxed);
  stream.push_work(
      "fill", [target = storage_of(dst), value, nbytes] { std::memset(target, value, nbytes); });
  return cudaSuccess;
}

}  // namespace
}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are CUDA's own names

cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t handle) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = work_error(*stream)) return error;
  return copy(dst, src, nbytes, kind, *stream, /*synchronous=*/false);
}

cudaError_t cudaMemcpyPeerAsync(void* dst, int dst_device, const void* src, int src_device,
                                std::size_t nbytes, cudaStream_t handle) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = work_error(*stream)) return error;
  const int num_devices = runtime().num_devices.load();
  if (dst_device < 0 || dst_device >= num_devices || src_device < 0 || src_device >= num_devices) {
    return failed(cudaErrorInvalidDevice);
  }
  int dst_home = -1;
  int src_home = -1;
  if (nbytes > 0 && (!is_device_memory(dst, nbytes, &dst_home) || dst_home != dst_device ||
                     !is_device_memory(src, nbytes, &src_home) || src_home != src_device)) {
    return failed(cudaErrorInvalidValue);
  }
  return copy(dst, src, nbytes, cudaMemcpyDeviceToDevice, *stream, /*synchronous=*/false);
}

cudaError_t cudaMemcpy(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (const cudaError_t error = unsafe_error(cudaErrorStreamCaptureImplicit)) return error;
  return copy(dst, src, nbytes, kind, *null_stream(host_thread().device), /*synchronous=*/true);
}

cudaError_t cudaMemsetAsync(void* dst, int value, std::size_t nbytes, cudaStream_t handle) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = work_error(*stream)) return error;
  return fill(dst, value, nbytes, *stream);
}

cudaError_t cudaMemset(void* dst, int value, std::size_t nbytes) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (const cudaError_t error = unsafe_error(cudaErrorStreamCaptureImplicit)) return error;
  return fill(dst, value, nbytes, *null_stream(host_thread().device));
}
