// How a CUDA stream waits for work of the host. Private to engine, like stream_impl.h.
//
// [Note: a GPU that waits for the host]
// Of an event of the CPU a GPU knows nothing. So a stream that is to wait for one waits for a word
// of page-locked memory to reach a number, a wait of the GPU's front end that holds up nothing but
// the stream, and whoever reaches the event writes the number. (A host function that blocks would
// do it too, but CUDA may run all of them in one thread: one that waits would hold up others that
// it waits for.) A stream that waited for work that failed goes on, without what it waited for; its
// next call, or the end of synchronize(), throws.
//
// The thread that writes the number must not wait for anything that waits for the GPU, which any
// call of CUDA does: see cuda_host_events.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/stream_impl.h"

namespace tessera::engine::internal {

class HostFailure;

/// A word of page-locked memory and the number that is waited for; whoever holds it may be about to
/// read or write.
struct HostFlag {
  std::shared_ptr<std::uint32_t> word;  ///< keeps the memory
  std::uint32_t number = 0;
};

/// The flags of one stream.
class HostFlags {
 public:
  HostFlags();
  /// Makes `stream`, of GPU `device`, which must be current, wait for `event`. The result is kept
  /// until the stream is past the wait. Throws DeviceError.
  std::shared_ptr<HostFlag> wait_for(CpuEventState& event, cudaStream_t stream, int device);
  /// Throws what an event that was waited for failed with.
  void check() const;

 private:
  std::shared_ptr<HostFlag> take(int device);

  std::vector<std::shared_ptr<HostFlag>> flags_;
  std::shared_ptr<HostFailure> failure_;
};

}  // namespace tessera::engine::internal
