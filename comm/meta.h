// A rank of a world that is not there: collectives are launched and counted, and bring nothing. For
// streams of meta devices (engine/meta.h).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/process_group.h"

namespace tessera::comm {

struct MetaOptions {
  bool sums_in_rank_order = true;  ///< of the backend that it stands for
  bool stages = false;        ///< its reductions need memory besides their tensors (comm/staging.h)
  int ranks_per_process = 1;  ///< more: they share memory, as comm/hybrid has them
  /// Told of each collective, of the groups that are split from this one as well, once `stream` has
  /// simulated it. `ranks`: between which, as this world numbers them.
  std::function<void(const Collective&, const std::vector<int>& ranks, const Stream& stream)>
      on_collective = {};
};

/// Rank `rank` of `size`. Nothing is ever compared with other ranks. split() throws
/// InvalidArgument: split_by() does not. Throws InvalidArgument unless 0 <= rank < size.
std::unique_ptr<ProcessGroup> make_meta_rank(int rank, int size, MetaOptions options = {});

}  // namespace tessera::comm
