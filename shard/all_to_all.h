// An exchange between ranks that gradients pass back through.
//
// [Note: where a differentiable collective lives]
// It needs the tape and a process group, and shard sees both. The tape carries no group: every op
// would be handed one, and few need it. Ops see none either: a model calls this between ops.
#pragma once

#include <string_view>

#include "comm/process_group.h"
#include "engine/tape.h"

namespace tessera::shard {

/// y: block s of rank r becomes block r of rank s, where a rank's x is cut into size() equal
/// blocks; backward does the same with dy. x of any shape, f32 or bf16 -> y of that shape; in a
/// group of one x itself. Saves nothing. `label`, the same on all ranks, is for errors and traces.
///   Collective: in forward, in backward if x needs a gradient, and in forward again where a region
/// is recomputed. So all ranks of `group` run the same model. A rank that takes part in a
/// micro-step without a batch (Fsdp::join()) does not come here: use one or the other. It is work
/// of the tape's stream, so `group`, which outlives what is recorded, is for that stream alone:
/// make one by world.split(). Throws InvalidArgument unless size() divides the elements, CommError
/// as the group does.
engine::Tensor all_to_all(engine::Tape& tape, comm::ProcessGroup& group, const engine::Tensor& x,
                          std::string_view label);

}  // namespace tessera::shard
