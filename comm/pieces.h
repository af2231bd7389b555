// The collectives as pieces of work on shared memory. A piece is small enough to stay in a core's
// cache: what is read once from memory is summed, or written to every rank, from there.
#pragma once

#include <cstdint>

#include "comm/process_group.h"
#include "comm/rendezvous.h"
#include "engine/dtype.h"

namespace tessera::comm {

// Slots hold the tensors' first elements, as ProcessGroup says; `size` is the number of ranks.

/// A block is what one rank brings: read once, written to all.
Pieces all_gather_pieces(std::int64_t in_nbytes, int size);
/// A block is what one rank receives: its part of every input, summed.
Pieces reduce_scatter_pieces(engine::DType in_dtype, std::int64_t out_numel, Accumulate accumulate,
                             int size);
/// A block is an equal share. The running sum is read from rank 0, where it is as everywhere.
Pieces all_reduce_pieces(engine::DType in_dtype, std::int64_t numel, Accumulate accumulate,
                         int size);
/// A block is an equal share. Slots hold the same pointer as in and out.
Pieces broadcast_pieces(std::int64_t nbytes, int root, int size);
/// A block is what one rank receives, `part_nbytes` from each.
Pieces all_to_all_pieces(std::int64_t part_nbytes, int size);

}  // namespace tessera::comm
