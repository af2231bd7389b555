// How a thread that a GPU waits for waits for the GPU. Private to engine, like stream_impl.h.
//
// [Note: a host that a GPU waits for]
// Calls of CUDA take a lock of the context, and one that finds the queue of its stream full (about
// a thousand tasks) keeps it until the GPU has made room. If the GPU then waits for a thread of the
// host (cuda_host_flags.h), and that thread asks CUDA for anything, to wait for an event or only to
// destroy one, none of the three goes on. Two ranks of one H100 that offload everything stood still
// like that within their first steps. So such a thread calls nothing of CUDA, not even as the last
// owner of something: it waits for an event of the host in place of that of the GPU, which whoever
// enqueues the wait asks for, and which CUDA's own thread sets when the GPU is there.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "engine/stream_impl.h"

namespace tessera::engine::internal {

/// Tells the host of events of one GPU, by a stream of its own that does nothing else: a stream
/// stands still while it tells. For one thread at a time.
class HostEvents {
 public:
  explicit HostEvents(int gpu) : gpu_(gpu) {}
  ~HostEvents();
  HostEvents(const HostEvents&) = delete;
  HostEvents& operator=(const HostEvents&) = delete;

  /// An event of the host that is reached soon after `event`, of the same GPU; its error, a
  /// DeviceError, begins with `what`. The GPU must be current. Throws DeviceError.
  std::shared_ptr<EventState> behind(cudaEvent_t event, std::string what);

 private:
  const int gpu_;
  cudaStream_t stream_ = nullptr;  // made when first used
};

}  // namespace tessera::engine::internal
