// Options that name what a training reads, as records of runs compare them.
#pragma once

#include <string>
#include <string_view>

namespace tessera::tools {

/// Whether the option `name` says which files a training reads: its data, their tokenizer, and what
/// it starts from.
bool names_inputs(std::string_view name);

/// `text` of such an option, with the paths of the files that it leads to: however they were typed,
/// and from wherever, as two runs may have been started from different folders. Throws as
/// parse_mix().
std::string resolved_inputs(std::string_view name, const std::string& text);

}  // namespace tessera::tools
