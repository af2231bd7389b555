// The emulated CUDA runtime, as the other parts of the emulation see it: kernels (device.h) and
// emulated libraries put work on streams and find the storage behind device addresses.
//
// The C functions of <cuda_runtime_api.h> are defined by this library. Tests steer it by control.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace tessera::cuda_emulation {

/// One kernel and its grid. `run_grid(seed)` runs every thread of the grid and is called by the
/// stream's worker: once, or at each launch of a graph that holds it; `seed` picks the order of
/// threads, 0 the natural order. What it throws (std::exception) becomes a sticky launch failure,
/// its text goes to stderr.
struct KernelLaunch {
  std::string name = {};
  const void* kernel = nullptr;  ///< the function, as given to cudaFuncSetAttribute
  dim3 grid = {};
  dim3 block = {};
  std::size_t shared_nbytes = 0;  ///< dynamic shared memory
  std::function<void(std::uint64_t seed)> run_grid = {};
};

/// Replaces each device address among the 8-byte words of a kernel's packed arguments by that of
/// its storage. `bytes` must be aligned to 8; a tail of less than 8 bytes holds no address.
/// Call it in the thread that launches, before enqueue_kernel.
void translate_arguments(void* bytes, std::size_t nbytes);

/// Told by the thread that launches of each argument that is a pointer, before translation: one to
/// pageable host memory makes the launch fail as an illegal address does.
void check_pointer_argument(const void* argument);

/// Checks the launch as the device does and puts it on `stream`, which must belong to the calling
/// thread's current device. Errors are those of cudaLaunchKernel and set the last error.
cudaError_t enqueue_kernel(cudaStream_t stream, KernelLaunch launch);

/// Puts other device work (of an emulated library) on `stream`. `fn` may block; what it throws
/// becomes a sticky error of the device.
cudaError_t enqueue(cudaStream_t stream, std::string name, std::function<void()> fn);

/// While one lives, the calling thread stands for a library's own, whose current device is
/// `device`.
class LibraryThread {
 public:
  explicit LibraryThread(int device);
  ~LibraryThread();
  LibraryThread(const LibraryThread&) = delete;
  LibraryThread& operator=(const LibraryThread&) = delete;

 private:
  const int device_;  // the thread's
  const bool has_context_;
};

/// Where the bytes of a device address are. Addresses outside device memory come back unchanged.
void* storage_of(const void* address);
template <class T>
T* storage_of(T* address) {
  return static_cast<T*>(storage_of(static_cast<const void*>(address)));
}

/// Whether [address, address + nbytes) lies in one live allocation of device memory. `device`, if
/// given, receives its device.
bool is_device_memory(const void* address, std::size_t nbytes, int* device = nullptr);
/// Whether [address, address + nbytes) lies in one live allocation of page-locked host memory.
bool is_pinned_memory(const void* address, std::size_t nbytes);

/// The device of a stream; -1 if it is not a live stream.
int device_of(cudaStream_t stream);

}  // namespace tessera::cuda_emulation
