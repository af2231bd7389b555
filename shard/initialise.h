// Initial values that need a whole parameter: by a formula of one's own, or read from a file.
#pragma once

#include <functional>
#include <span>

#include "engine/parameter.h"
#include "shard/fsdp.h"

namespace tessera::shard {

/// Writes every parameter: `fn` is given one at a time, in the order of units, and fills all of its
/// values, which are f32 on the host in workspace that is gone before the next. So a model that no
/// rank could hold whole is made with the shards, the slots and one parameter. (Init, which
/// engine::Parameter carries, needs not even that: each rank computes its elements alone.)
/// `only_rank`: the rank that calls `fn`, and whose values are sent to all; -1: all ranks call it,
/// with the same result, and nothing but updated parts is sent. Collective. Throws InvalidArgument
/// as CutValues::check_at_rest().
void initialise(Fsdp& fsdp,
                const std::function<void(const engine::Parameter&, std::span<float>)>& fn,
                int only_rank = -1);

}  // namespace tessera::shard
