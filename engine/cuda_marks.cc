#include "engine/cuda_marks.h"

#include "engine/cuda_check.h"

namespace tessera::engine::internal {

bool is_reached(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check_cuda(status, "cudaEventQuery");
  return true;
}

CudaMarks::~CudaMarks() {
  if (all_.empty()) return;
  on_gpu_quietly(gpu_, [this] {
    for (cudaEvent_t event : all_) (void)cudaEventDestroy(event);
  });
}

CudaMark CudaMarks::record(cudaStream_t stream) {
  if (free_.empty()) {
    // Room first: what gives an event back must not throw, nor may one be lost.
    if (all_.size() == all_.capacity()) all_.reserve(2 * all_.size() + 16);
    free_.reserve(all_.capacity());
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreateWithFlags");
    all_.push_back(event);
    free_.push_back(event);
  }
  cudaEvent_t const event = free_.back();
  free_.pop_back();
  CudaMark mark(event, [this](cudaEvent_t e) { free_.push_back(e); });
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  return mark;
}

}  // namespace tessera::engine::internal
