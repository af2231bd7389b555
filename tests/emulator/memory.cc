// Device and page-locked memory as CUDA's C functions, and addresses in kernel arguments.
#include <algorithm>
#include <memory>
#include <optional>

#include "tests/emulator/arena.h"
#include "tests/emulator/capture.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {

void* storage_of(const void* address) {
  auto value = reinterpret_cast<std::uintptr_t>(address);
  if (device_arena().contains(value)) value += device_arena().storage_offset();
  return reinterpret_cast<void*>(value);
}

bool is_device_memory(const void* address, std::size_t nbytes, int* device) {
  const Unseen unseen;
  const auto found = device_arena().containing(reinterpret_cast<std::uintptr_t>(address), nbytes);
  if (found && device != nullptr) *device = found->device;
  return found.has_value();
}

bool is_pinned_memory(const void* address, std::size_t nbytes) {
  const Unseen unseen;
  return pinned_arena().containing(reinterpret_cast<std::uintptr_t>(address), nbytes).has_value();
}

void translate_arguments(void* bytes, std::size_t nbytes) {
  const Arena& arena = device_arena();
  HostThread& thread = host_thread();
  auto* words = static_cast<std::uintptr_t*>(bytes);
  for (std::size_t i = 0; i < nbytes / sizeof(std::uintptr_t); ++i) {
    if (!arena.contains(words[i])) continue;
    const int device = arena.device_of(words[i]);
    if (device != thread.device &&
        !runtime().devices[thread.device].peer_enabled[device].load(std::memory_order_relaxed)) {
      thread.illegal_address = "memory of a device without peer access";
    }
    words[i] += arena.storage_offset();
  }
}

void check_pointer_argument(const void* argument) {
  const auto address = reinterpret_cast<std::uintptr_t>(argument);
  if (argument == nullptr || device_arena().contains(address) || pinned_arena().contains(address)) {
    return;
  }
  host_thread().illegal_address = "an argument points to pageable host memory";
}

}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are CUDA's own names

cudaError_t cudaMalloc(void** address, std::size_t nbytes) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (const cudaError_t error = unsafe_error()) return error;
  if (address == nullptr) return failed(cudaErrorInvalidValue);
  *address = nullptr;
  if (nbytes == 0) return cudaSuccess;
  Runtime& machine = runtime();
  machine.counters.mallocs.fetch_add(1, std::memory_order_relaxed);
  const int number = host_thread().device;
  Device& device = machine.devices[number];
  if (device.mallocs.fails()) return failed(cudaErrorMemoryAllocation);
  const std::size_t used = device.used_nbytes.fetch_add(nbytes) + nbytes;
  std::optional<Allocation> made;
  if (used <= machine.memory_nbytes.load()) made = device_arena().allocate(number, nbytes);
  if (!made) {
    device.used_nbytes.fetch_sub(nbytes);
    return failed(cudaErrorMemoryAllocation);
  }
  machine.counters.allocations.fetch_add(1, std::memory_order_relaxed);
  machine.counters.allocated_nbytes.fetch_add(static_cast<std::int64_t>(nbytes));
  *address = reinterpret_cast<void*>(made->address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  const Unseen unseen;
  if (address == nullptr) return entry_error();
  if (const cudaError_t error = unsafe_error()) return error;
  const auto found = device_arena().starting_at(reinterpret_cast<std::uintptr_t>(address));
  if (!found) return failed(cudaErrorInvalidValue);
  Runtime& machine = runtime();
  count_blocking();
  // Waits for the device, but nobody may rely on that: no edge.
  for (const std::shared_ptr<Stream>& stream : streams_of(found->device)) {
    stream->push_record()->block();
  }
  // A device that has failed unmaps nothing: its peers may still read there.
  const bool failed_device = machine.devices[found->device].sticky.load() != 0;
  if (!failed_device && !device_arena().free(found->address)) return failed(cudaErrorInvalidValue);
  machine.devices[found->device].used_nbytes.fetch_sub(found->nbytes);
  machine.counters.allocations.fetch_sub(1, std::memory_order_relaxed);
  machine.counters.allocated_nbytes.fetch_sub(static_cast<std::int64_t>(found->nbytes));
  return entry_error(found->device);
}

cudaError_t cudaHostAlloc(void** address, std::size_t nbytes, unsigned int flags) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (const cudaError_t error = unsafe_error()) return error;
  constexpr unsigned kFlags =
      cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
  if (address == nullptr || (flags & ~kFlags) != 0) return failed(cudaErrorInvalidValue);
  *address = nullptr;
  if (nbytes == 0) return cudaSuccess;
  Runtime& machine = runtime();
  machine.counters.mallocs.fetch_add(1, std::memory_order_relaxed);
  if (machine.devices[host_thread().device].pinned_mallocs.fails()) {
    return failed(cudaErrorMemoryAllocation);
  }
  const auto asked = static_cast<std::int64_t>(nbytes);
  const std::int64_t used = machine.counters.pinned_nbytes.fetch_add(asked) + asked;
  std::optional<Allocation> made;
  if (static_cast<std::size_t>(used) <= machine.pinned_nbytes.load()) {
    made = pinned_arena().allocate(host_thread().device, nbytes);
  }
  if (!made) {
    machine.counters.pinned_nbytes.fetch_sub(asked);
    return failed(cudaErrorMemoryAllocation);
  }
  machine.counters.pinned.fetch_add(1, std::memory_order_relaxed);
  *address = reinterpret_cast<void*>(made->address);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** address, std::size_t nbytes) {
  return cudaHostAlloc(address, nbytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* address) {
  const Unseen unseen;
  if (address == nullptr) return entry_error();
  if (const cudaError_t error = unsafe_error()) return error;
  const auto freed = pinned_arena().free(reinterpret_cast<std::uintptr_t>(address));
  if (!freed) return failed(cudaErrorInvalidValue);
  Runtime& machine = runtime();
  machine.counters.pinned.fetch_sub(1, std::memory_order_relaxed);
  machine.counters.pinned_nbytes.fetch_sub(static_cast<std::int64_t>(freed->nbytes));
  return entry_error();
}

cudaError_t cudaMemGetInfo(std::size_t* free_nbytes, std::size_t* total_nbytes) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  Runtime& machine = runtime();
  const std::size_t total = machine.memory_nbytes.load();
  const std::size_t used = machine.devices[host_thread().device].used_nbytes.load();
  if (total_nbytes != nullptr) *total_nbytes = total;
  if (free_nbytes != nullptr) *free_nbytes = total - std::min(total, used);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (attributes == nullptr) return failed(cudaErrorInvalidValue);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = cudaInvalidDeviceId;
  attributes->hostPointer = const_cast<void*>(pointer);
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (const auto device_memory = device_arena().containing(address, 0)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = device_memory->device;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = nullptr;
  } else if (const auto pinned = pinned_arena().containing(address, 0)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = pinned->device;
    attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}
