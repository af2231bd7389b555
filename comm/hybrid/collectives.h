// The collectives of a group that has several ranks in a process: what processes send each other,
// once for all of their ranks, and what these then do among themselves.
#pragma once

#include "comm/hybrid/share.h"
#include "comm/threads/rendezvous.h"

namespace tessera::comm {

/// This process's messages of a call that its ranks have made, by one of them: meets the other
/// processes first. Throws CommError.
void exchange_between(const HybridCall& call);

/// What the ranks of a process have to do after that: those of a group of `size` ranks from rank
/// `first` on, `num_here` of them. The slots' `out` are HybridShare.
Chunks chunks_inside(const Collective& collective, int size, int first, int num_here);

}  // namespace tessera::comm
