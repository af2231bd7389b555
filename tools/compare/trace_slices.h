// One step of a trace in Chrome's JSON format (--log.trace), as a chart of its streams needs it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "tools/compare/comparison.h"

namespace tessera::tools {

/// The last step of the first process that the trace marks as one (a slice called "step..."), or
/// all of it if none is: {"name": `name`, "duration_ms", "left_out", "threads": [{"name", "slices":
/// [[begin ms, duration ms, name]]}]}. Of many slices the longest, `left_out` counts the rest.
/// Throws IoError naming `path`: unreadable, no JSON, no slices.
nlohmann::ordered_json trace_slices(const std::string& path, const std::string& name);

/// The traces to show, of the folders that have a trace.json: two configurations that differ in
/// parallel.prefetch alone, on above off, or else the first one or two. `folders` as the rows.
nlohmann::ordered_json traces_to_show(const Comparison& comparison,
                                      std::span<const std::string> folders);

}  // namespace tessera::tools
