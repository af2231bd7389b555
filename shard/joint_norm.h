// One norm over the gradients of several Fsdps, such as a model and its experts.
#pragma once

#include <span>

#include "comm/process_group.h"
#include "shard/fsdp.h"
#include "shard/grad_norm.h"

namespace tessera::shard {

struct NormPart {
  const Fsdp& fsdp;
  const GradNorm& norm;  ///< what its finish_step() returned
};

/// The norm of the mean gradients of all parameters of `parts`, each counted once however many
/// ranks hold it: the same value on all ranks of `world`, of which the parts' groups are parts. On
/// the CPU summed exactly, so that it has the bits of one Fsdp of all of these parameters; on a GPU
/// from the parts' norms, each rounded to f32, for which the host waits. Collective over `world`,
/// between the finish_step() of all parts and their optimizers, which take it as
/// ClipFactor{clip_scale(norm, max_norm)}. Throws InvalidArgument if the gradients are means over
/// different numbers of batches (see FsdpOptions::mean_ranks) or not finite. On a meta device,
/// where there is nothing to add up, the same gathers and 0.
float joint_norm(comm::ProcessGroup& world, std::span<const NormPart> parts);

}  // namespace tessera::shard
