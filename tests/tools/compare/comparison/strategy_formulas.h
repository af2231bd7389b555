// What a strategy should hold and send by its formula (docs/compare.md), for models whose blocks
// are alike. Padding, the norm and the gather of losses are left out.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "engine/memory.h"
#include "tools/compare/request/request.h"

namespace tessera::testing {

/// Peak bytes of one rank on its device, of the categories that depend on the strategy. What has no
/// formula is not listed: anything under a budget, gradients under a hook, what is packed, and
/// whatever is partly offloaded.
std::map<engine::Category, double> memory_formulas(const tools::Configuration& c);

/// Bytes that one rank sends in a step if collectives are rings: (n - 1) / n of the whole for a
/// gather or a reduction to parts among n ranks; an all-reduce is one of each, whose second sends
/// sums in f32. None with a hook, a budget or packed units, and where parts are kept by neighbours.
std::optional<double> sent_formula(const tools::Configuration& c);

}  // namespace tessera::testing
