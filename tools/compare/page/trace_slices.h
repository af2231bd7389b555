// One step of a trace in Chrome's JSON format (--log.trace), as charts of its streams and of memory
// need it.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::tools {

/// At most so much of a step.
struct StepDetail {
  std::size_t max_points = 240;   ///< of memory
  std::size_t max_slices = 1500;  ///< on all threads
};

/// The last step of the first process that the trace marks as one (a slice called "step..."), from
/// the end of the one before, or all of it if none is:
///
///   {"name": `name`, "duration_ms", "left_out", "slices": [names of slices],
///    "threads": [{"name", "slices": [[begin ms, duration ms, number of its name]]}],
///    "memory": {"ms": [...], "bytes": {category: [...]}, "total": [...]}}
///
/// Of many slices the longest, `left_out` counts the rest. Memory is what the trace's counters show
/// from each of these times on, thinned such that its most stays; null where it has none. Throws
/// IoError naming `where`: no events, no slices.
nlohmann::ordered_json step_of_trace(const nlohmann::json& trace, const std::string& where,
                                     const std::string& name, const StepDetail& detail);
/// As step_of_trace(), of a file. Throws IoError naming `path`: unreadable, no JSON.
nlohmann::ordered_json step_of_trace_file(const std::string& path, const std::string& name,
                                          const StepDetail& detail);

}  // namespace tessera::tools
