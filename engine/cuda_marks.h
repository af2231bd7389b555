// Moments of a stream of a GPU, with their times. Private to engine, like stream_impl.h.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

namespace tessera::engine::internal {

/// Whether the GPU, which must be current, is past a recorded event. Throws DeviceError.
bool is_reached(cudaEvent_t event);

/// A recorded event with a time, which goes back to its CudaMarks with the last copy.
using CudaMark = std::shared_ptr<CUevent_st>;

/// The events that one stream's times are taken from. To make one and to destroy it costs the host
/// as much as to record it, so each is recorded again once nobody holds it: there are as many as
/// were held at one time. For one thread at a time; outlives its marks.
class CudaMarks {
 public:
  explicit CudaMarks(int gpu) : gpu_(gpu) {}
  ~CudaMarks();
  CudaMarks(const CudaMarks&) = delete;
  CudaMarks& operator=(const CudaMarks&) = delete;

  /// Now, on `stream`, whose GPU must be current. Throws DeviceError.
  CudaMark record(cudaStream_t stream);

 private:
  const int gpu_;
  std::vector<cudaEvent_t> all_;
  std::vector<cudaEvent_t> free_;  // has room for all
};

}  // namespace tessera::engine::internal
