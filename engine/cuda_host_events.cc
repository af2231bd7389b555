#include "engine/cuda_host_events.h"

#include <fmt/format.h>

#include <exception>
#include <memory>
#include <utility>

#include "engine/cpu_event.h"
#include "engine/cuda_check.h"
#include "engine/error.h"

namespace tessera::engine::internal {
namespace {

struct Told {
  std::shared_ptr<CpuEvent> event;
  std::string what;
};

// In a thread of CUDA, which allows no calls of it here.
void tell(cudaStream_t, cudaError_t status, void* told) {
  const std::unique_ptr<Told> t(static_cast<Told*>(told));
  if (status == cudaSuccess) return t->event->set(nullptr);
  t->event->set(std::make_exception_ptr(DeviceError(fmt::format(
      "{}: [cuda] expected the GPU to get there, got {}", t->what, cudaGetErrorName(status)))));
}

}  // namespace

HostEvents::~HostEvents() {
  if (stream_ == nullptr) return;
  on_gpu_quietly(gpu_, [this] {
    (void)cudaStreamSynchronize(stream_);
    (void)cudaStreamDestroy(stream_);
  });
}

std::shared_ptr<EventState> HostEvents::behind(cudaEvent_t event, std::string what) {
  if (stream_ == nullptr) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
  }
  auto told = std::make_unique<Told>(Told{std::make_shared<CpuEvent>(), std::move(what)});
  const std::shared_ptr<CpuEvent> reached = told->event;
  check_cuda(cudaStreamWaitEvent(stream_, event, 0), "cudaStreamWaitEvent");
  // Not cudaLaunchHostFunc, whose functions do not run once the GPU has failed: the host would wait
  // for ever.
  check_cuda(cudaStreamAddCallback(stream_, tell, told.get(), 0), "cudaStreamAddCallback");
  static_cast<void>(told.release());
  return reached;
}

}  // namespace tessera::engine::internal
