// Reductions through the processes of a group, one after the other.
//
// [Note: a chain of processes] A sum in rank order is a sum through processes in their order: each
// adds what its own ranks bring to what comes from the process before, and sends that on. So the
// bytes that cross do not grow with the ranks of a process. The whole goes through in pieces, so
// that processes work at the same time. The last process sends the sums to their owners; of an
// all-reduce, where all are owners, each other process gets a part of them, which it passes on to
// the rest. With Accumulate::kYes a sum begins where it does with threads: with what the owner of
// its block holds, which it sends to the first process, or with what rank 0 holds in an all-reduce.
#pragma once

#include "comm/hybrid/share.h"

namespace tessera::comm {

/// This process's share of a reduce_scatter or an all_reduce, whose ranks have met. Of an
/// all_reduce the first rank here has the sums then, the others nothing yet. Throws CommError.
void reduce_in_chain(const HybridCall& call);

}  // namespace tessera::comm
