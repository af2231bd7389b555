// What processor this is.
#pragma once

#include <string>

namespace tessera::tools {

/// As the kernel calls it: "AMD EPYC 9B45"; "unknown processor" if it does not say. Reads /proc
/// below `root` (tests give another).
std::string cpu_model(const std::string& root = "");

}  // namespace tessera::tools
