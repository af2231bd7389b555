// Dropout of what is added to a residual stream, with masks that depend on the sample alone.
#pragma once

#include <string_view>

#include "engine/tape.h"
#include "tools/models/model.h"

namespace tessera::tools {

/// x (B, T, C) with elements dropped at the rate `p`, in training; `name` tells places of a model
/// apart. Sample n has the same mask on whatever rank and in whatever micro-step it comes.
engine::Tensor residual_dropout(engine::Tape& tape, const engine::Tensor& x, double p,
                                std::string_view name, const Pass& pass);

}  // namespace tessera::tools
