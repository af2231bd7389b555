// Errors of the CUDA runtime as exceptions, and the calling thread's current GPU.
#pragma once

#include <cuda_runtime_api.h>

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
class CurrentGpu {
 public:
  explicit CurrentGpu(int index) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == index) return;
    check_cuda(cudaSetDevice(index), "cudaSetDevice");
    changed_ = true;
  }
  ~CurrentGpu() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace tessera::engine
