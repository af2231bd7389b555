// How the ranks of a group of processes tell each other bytes that are no tensors.
#pragma once

#include <cstddef>
#include <span>

#include "engine/stream.h"

namespace tessera::comm {

/// One rank's end, as a transport provides it. Used by one thread, one exchange at a time.
class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Begins to give `own`, of equal size on all ranks, to every rank: as work of `stream`, after
  /// what lies there, or at once if that is null. Does not wait for other ranks. Throws CommError.
  virtual void begin(std::span<const std::byte> own, const engine::Stream* stream) = 0;
  /// What all ranks gave, one after the other, once all have; until then empty.
  virtual std::span<const std::byte> answers() = 0;
  /// The world has failed: ends what waits in the transport.
  virtual void release() noexcept = 0;
};

}  // namespace tessera::comm
