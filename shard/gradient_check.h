// Whose gradient was not finite: each rank looks at its own before they are summed.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/host_gather.h"
#include "engine/memory.h"
#include "engine/parameter.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

/// Of one rank. What it finds stays on its device until the ranks' findings are gathered.
class GradientCheck {
 public:
  /// `parameters`: all trainable ones, in one order on all ranks.
  GradientCheck(const engine::Memory& memory, std::vector<const engine::Parameter*> parameters);

  /// Nothing is found yet.
  void begin_step(const engine::Stream& compute);
  /// From 0.
  void begin_micro_step(int micro_step) { micro_step_ = micro_step; }
  /// Looks, as work of `compute`, at what `p` has in this micro-step; `grad` is f32 or bf16.
  void look(const engine::Stream& compute, const engine::Parameter& p, const engine::Tensor& grad);

  /// Every rank's finding, on its way to the host. Collective.
  comm::HostGather gather(comm::ProcessGroup& group, const engine::Stream& stream,
                          const engine::Memory& pinned) const;
  /// "h.0.weight, rank 1, micro-step 2": the first in the order of micro-steps, parameters and
  /// ranks; empty if no rank found one.
  std::string describe(const comm::HostGather& findings) const;

 private:
  std::int64_t code_of(const engine::Parameter& p) const;

  engine::Memory memory_;
  std::vector<const engine::Parameter*> parameters_;
  std::unordered_map<const engine::Parameter*, std::int64_t> numbers_;
  int micro_step_ = 0;
  engine::Tensor found_;  // (1) i64: the largest code_of() what was found, or 0
};

}  // namespace tessera::shard
