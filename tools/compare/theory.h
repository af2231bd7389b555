// What a strategy should hold and send by its formula (docs/strategies.md), to lay beside what was
// measured. Padding, the norm and the gather of losses are left out, so a measured figure may be a
// little above.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/compare/request.h"

namespace tessera::tools {

/// "2 x 4 B x 630912 / 4" and what that comes to.
struct Formula {
  std::string name;     ///< a memory category, or "sent"
  std::string words;    ///< the formula with names: "8 B x parameters / ranks"
  std::string numbers;  ///< the same with numbers
  double value = 0;     ///< bytes
};

/// Peak bytes of one rank on its device, of the categories that depend on the strategy: parameter
/// shard, gathered parameter, gradient, optimizer. What has no formula is not listed: gradients
/// under a hook, and whatever is partly offloaded.
std::vector<Formula> memory_formulas(const Configuration& c);

/// Bytes that one rank sends in a step if collectives are rings: (n - 1) / n of the whole for a
/// gather or a reduction to parts among n ranks; an all-reduce is one of each, whose second sends
/// sums in f32. None with a hook, and where parts are kept by neighbours.
std::optional<Formula> sent_formula(const Configuration& c);

}  // namespace tessera::tools
