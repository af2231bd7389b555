// What launchers and people leave in the environment, and whether it is heeded.
#pragma once

#include <map>
#include <string>

#include "tools/doctor/check.h"

namespace tessera::tools {

using Environment = std::map<std::string, std::string>;
/// Of this process.
Environment environment();

/// Every variable that is set and that people may expect to count, a check each: those that are
/// heeded, and those that are not, with the option that does it here. One kOk check if there are
/// none.
Checks check_launcher(const Environment& environment);

}  // namespace tessera::tools
