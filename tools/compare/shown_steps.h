// The steps that the page draws: of which configurations, and whether from a trace or from a plan.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/compare/comparison.h"

namespace tessera::tools {

/// A step of `c` as its plan has it, on a device that is not there and in simulated time: as
/// step_of_trace(), with "source": "plan", and the arithmetic of memory as "terms" and
/// "host_terms":
/// [{"category", "text", "bytes"}]. Throws what planning throws.
nlohmann::ordered_json planned_step(const Configuration& c, std::size_t max_points);

/// {"streams": two steps with gathers ahead above the same without, of runs that left a trace.json
/// ("source": "trace") or else as planned; one where nothing is gathered;
///  "memory": of the first 64 configurations that were trained one step each, {"name", "source",
///  "duration_ms", "memory", "terms", "host_terms"}, in the order of the rows}. `folders` as the
///  rows; empty: not trained. What
/// cannot be read or planned is left out, and said in `warnings`.
nlohmann::ordered_json steps_to_show(const Comparison& comparison,
                                     std::span<const std::string> folders,
                                     std::vector<std::string>& warnings);

}  // namespace tessera::tools
