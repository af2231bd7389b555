// The collectives as chunks of work on shared memory. A chunk is small enough to stay in a core's
// cache: what is read once from memory is summed, or written to every rank, from there.
#pragma once

#include "comm/process_group.h"
#include "comm/threads/rendezvous.h"

namespace tessera::comm {

/// The work of `collective` among `size` ranks, for one of them. Slots hold the tensors' first
/// elements, as ProcessGroup says. Nothing is allocated while a chunk runs.
Chunks chunks_of(const Collective& collective, int size);

}  // namespace tessera::comm
