// Which processor this is.
#pragma once

#include <string>

namespace tessera::tools {

/// As /proc/cpuinfo below `root` names it (tests give another): "AMD EPYC 9B14"; "unknown
/// processor" if it does not.
std::string cpu_model(const std::string& root = "");

}  // namespace tessera::tools
