// One norm over the gradients of several Fsdps, such as a model and its experts.
#pragma once

#include <span>
#include <string>
#include <utility>

#include "comm/process_group.h"
#include "shard/fsdp.h"
#include "shard/grad_norm.h"

namespace tessera::shard {

struct NormPart {
  const Fsdp& fsdp;
  const GradNorm& norm;  ///< what its finish_step() returned
};

/// What joint_norm() returns; a value.
class JointNorm {
 public:
  /// Throws InvalidArgument naming a parameter whose gradient is not finite.
  float value() const;
  /// Which gradient is not finite, for people, and which rank of `world` saw it; empty if all are.
  /// Equal on all ranks.
  const std::string& not_finite() const { return not_finite_; }

 private:
  JointNorm(float value, std::string not_finite)
      : value_(value), not_finite_(std::move(not_finite)) {}
  friend JointNorm joint_norm(comm::ProcessGroup& world, std::span<const NormPart> parts);

  float value_;  // means nothing if a gradient is not finite
  std::string not_finite_;
};

/// The norm of the mean gradients of all parameters of `parts`, each counted once however many
/// ranks hold it: the same value on all ranks of `world`, of which the parts' groups are parts. On
/// the CPU summed exactly, so that it has the bits of one Fsdp of all of these parameters; on a GPU
/// from the parts' norms, each rounded to f32, for which the host waits. Collective over `world`,
/// between the finish_step() of all parts and their optimizers, which all take it as
/// step(lr, norm, max_norm): then either every update of every rank is made, or none is. Throws
/// InvalidArgument if the gradients are means over different numbers of batches (see
/// FsdpOptions::mean_ranks), and on every rank alike if they are not finite, unless all parts of
/// all ranks have NonFinite::kSkip. On a meta device, where there is nothing to add up, the same
/// gathers and 0.
JointNorm joint_norm(comm::ProcessGroup& world, std::span<const NormPart> parts);

}  // namespace tessera::shard
