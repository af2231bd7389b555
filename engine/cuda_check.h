// Errors of the CUDA runtime as exceptions, and the calling thread's current GPU. Defined where
// CUDA is built.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string_view>

#include "engine/error.h"

namespace tessera::engine {

/// Throws DeviceError unless `status` is success. `call`: the call that returned it, with whatever
/// tells it apart. A failed kernel is reported by a later call: the text says what was asked last.
inline void check_cuda(cudaError_t status, std::string_view call) {
  if (status == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();  // the next call starts clean, unless the error is sticky
  fail<DeviceError>("[cuda] expected {} to succeed, got {}: {}", call, cudaGetErrorName(status),
                    cudaGetErrorString(status));
}

/// Makes GPU `index` current for the calling thread, for the life of this object.
/// [Note: contexts] To make a GPU current gives it a context of this process, some hundred MB, and
/// a thread that has neither chosen nor used any has GPU 0. So the GPU before is made current again
/// only if the thread has a context of it. Otherwise the thread stays with `index`: a process for
/// GPU 1 takes nothing of GPU 0, and threads of ranks do not change their GPU twice a launch. Calls
/// that need some current GPU, to ask an event for its state among them, must stand in the life of
/// such an object.
class CurrentGpu {
 public:
  explicit CurrentGpu(int index);
  ~CurrentGpu();
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int before_ = -1;  // to be made current again
};

/// fn(), which must not throw, with GPU `index` current, for what cleans up: after an error of the
/// GPU, with whichever is.
template <class F>
void on_gpu_quietly(int index, F fn) noexcept {
  std::optional<CurrentGpu> current;
  try {
    current.emplace(index);
  } catch (...) {  // nobody can be told
  }
  fn();
}

/// A function of the driver by its name. Its library is found at run time, as a build needs none.
/// Throws DeviceError.
void* find_driver_function(const char* name);

}  // namespace tessera::engine
