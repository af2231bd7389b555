// What moves between a device and page-locked memory of its host, and works there. See
// OffloadOptions.
//
// [Note: offload]
// A unit's shard, the sum of its gradients and its optimizer state are cut in two: the first part
// stays on the device, the last lies in host memory (SplitTensor).
//
//   parameters  copied into the rank's own block of the gathered slot, where the gather takes them
//               from: no staging                                                  (stream fetch)
//   gradients   reduced in a slot on the device, from which both parts are written back; the next
//               micro-step first copies the running sum there again, so that the order of additions
//               and with it the bits are those without offload         (streams sums_down, sums_up)
//   optimizer   updates are made where the states lie, on the host by `hosts`. What else an update
//               reads and writes is copied if it lies elsewhere                (streams up, down)
//
// Whoever waits is a stream: a GPU's waits for the host's work on the device (Stream::wait), a
// host's for a GPU in a thread that launches nothing. So the thread that launches work of a GPU
// does not wait, and compute only for parameters that have not come yet, and for what its own part
// of an update reads. Threads of the host must not be the last to hold memory of a GPU: to give it
// back can mean to wait for the GPU, which may wait for them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "engine/buffer.h"
#include "engine/stream.h"
#include "shard/layout.h"
#include "shard/options.h"

namespace tessera::shard {

/// Device memory in which the gradients of a unit are added to their sum, while that lies on the
/// host. Units take turns.
struct SumSlot {
  std::shared_ptr<engine::Buffer> buffer;
  engine::Event last_use = {};
};

/// Masters on the host that were written.
struct WrittenOnHost {
  Range range;  ///< of Flat::owned, from which it counts; all on the host
  engine::Event when;
  std::size_t host = 0;  ///< of Offload::hosts(): whose thread had them last
};

class Offload {
 public:
  /// Streams besides `compute`.
  Offload(const engine::Stream& compute, const FsdpOptions& options);

  const engine::Stream& fetch() const { return fetch_; }
  /// For sums, so that backward need not wait for updates.
  const engine::Stream& sums_up() const { return sums_up_; }
  const engine::Stream& sums_down() const { return sums_down_; }
  /// For updates.
  const engine::Stream& up() const { return up_; }
  const engine::Stream& down() const { return down_; }
  /// Threads of the host, as many as OffloadOptions::threads says.
  std::span<const engine::Stream> hosts() const { return hosts_; }

  /// Blocks until all that was launched is done. Throws the first error.
  void synchronize() const;
  void synchronize_quietly() const noexcept;

 private:
  engine::Stream fetch_, sums_up_, sums_down_, up_, down_;
  std::vector<engine::Stream> hosts_;
};

}  // namespace tessera::shard
