// The steps that the page draws: of which configurations, and whether from a trace or from a plan.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/compare/comparison/comparison.h"
#include "tools/compare/page/trace_slices.h"

namespace tessera::tools {

/// A step of `c` as it is fitted and its plan has it, on a device that is not there and in
/// simulated time: as step_of_trace(), with "source": "plan", the arithmetic of memory as "terms"
/// and "host_terms": [{"category", "text", "bytes"}], and that of what is sent as "sent_terms":
/// [{"text", "bytes"}]. Throws what planning throws.
nlohmann::ordered_json planned_step(const Configuration& c, const StepDetail& detail = {});

/// {"steps": one of each configuration, of runs that left a trace.json as traced ("source":
///  "trace"), else as planned, in the order of the rows; the arithmetic is always the plan's;
///  "streams": which two are drawn one above the other until others are picked, by their numbers:
///  one with gathers ahead above the same without, which is planned if it was not trained, and is
///  then the last of the steps; one alone where nothing is gathered}.
/// Of many configurations the first 64 that were trained and those two. `folders` as the rows;
/// empty: not trained. What cannot be read or planned is left out, and said in `warnings`.
nlohmann::ordered_json steps_to_show(const Comparison& comparison,
                                     std::span<const std::string> folders,
                                     std::vector<std::string>& warnings);

}  // namespace tessera::tools
