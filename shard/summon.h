// Whole parameters between steps, to be looked at or edited.
//
//   summon(fsdp, {&h0.weight, &h0.a, &h0.b},
//          [](const std::vector<engine::Tensor>& w) { add_product(w[0], w[1], w[2]); },
//          {.write_back = true});
#pragma once

#include <functional>
#include <vector>

#include "engine/parameter.h"
#include "engine/tensor.h"
#include "shard/fsdp.h"

namespace tessera::shard {

struct SummonOptions {
  /// What `fn` leaves in the tensors becomes the values.
  bool write_back = false;
  /// The rank that alone is given values, and whose edits become those of all; -1: every rank is
  /// given them, and makes the same edits.
  int only_rank = -1;
};

/// Collective. Calls `fn` with the whole `parameters`, in their order: f32, in their shapes, in
/// memory of the device of the compute stream, with all earlier work of that stream done. `fn` may
/// launch work there. The tensors are workspace: name as many parameters as there is room for.
/// Masters are read and written, not what is computed with: nothing is rounded but what is frozen
/// in bf16. Throws InvalidArgument inside a step, inside a region (parameters are gathered for use
/// then), for a parameter that is not wrapped, and, on every rank alike, naming parameter and ranks
/// if the ranks' edits differ; inside `fn` a step or an update with Fsdp is refused if it is to be
/// written back. If `fn` throws, nothing is written.
void summon(Fsdp& fsdp, const std::vector<const engine::Parameter*>& parameters,
            const std::function<void(const std::vector<engine::Tensor>&)>& fn,
            SummonOptions options = {});

}  // namespace tessera::shard
