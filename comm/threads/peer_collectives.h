// A collective of thread ranks on GPU memory. Defined where CUDA is built.
//
// [Note: thread ranks on GPUs] The ranks meet when they enqueue, in their own threads, with the
// same comparison, deadline and errors as on the CPU. Each brings its addresses and an event,
// `ready`. Then each enqueues its share on its own stream: wait for all ready events, read the
// peers' memory, record `done`. Once all have, each stream waits for all done events: what lies
// after the collective on a stream finds its output complete and its input unread. No GPU ever
// waits for work that is not enqueued, so no failure of a rank can hang another's stream. Waits are
// only for ranks that touch the memory in question. A share is what one rank receives, or of an
// all_reduce an equal part, written to all. The ranks may have a GPU each or share one. As the
// meeting blocks the calling thread, all ranks call the collectives of all their groups in one
// order.
#pragma once

#include <functional>

#include "comm/process_group.h"
#include "comm/threads/rendezvous.h"

namespace tessera::comm {

/// Enqueues this rank's share of `collective` on `gpu`, inside the function given to launch().
/// Returns once all ranks have enqueued theirs. Throws CommError as Rendezvous::meet(), DeviceError
/// if CUDA refuses (then the world has failed with it), InvalidArgument for more than 64 ranks.
/// Gives a check to be made once `gpu` has come here: it throws DeviceError with the rank if some
/// GPU had failed, so that its rank's part of the data is not there.
std::function<void()> meet_on_gpu(Rendezvous& rendezvous, int rank, const Call& call,
                                  const Collective& collective, const Stream& gpu);

}  // namespace tessera::comm
