// Numbers of all ranks on their way to the host, which reads them when it needs them and holds
// nothing up until then.
#pragma once

#include <vector>

#include "comm/process_group.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::tools {

class PendingGather {
 public:
  /// Gathers `values` ([n] f32, complete once its memory's stream gets here) beside compute, on
  /// `metrics`. `pinned`: for the copy that the host reads. Collective.
  PendingGather(comm::ProcessGroup& world, engine::Tensor values, const engine::Stream& metrics,
                const engine::Memory& pinned);

  /// Every rank's values, rank by rank. On the CPU the wait counts as compute's. Throws CommError
  /// if the gather failed.
  std::vector<float> wait(const engine::Stream& compute) const;

 private:
  comm::ProcessGroup* world_;
  engine::Tensor values_, all_, host_;
  engine::Event ready_;
};

}  // namespace tessera::tools
