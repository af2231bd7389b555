// What launchers and people leave in the environment, and whether it is heeded.
#pragma once

#include "tools/doctor/check.h"
#include "tools/machine/environment.h"

namespace tessera::tools {

/// Every variable that is set and that people may expect to count, a check each: those that are
/// heeded, and those that are not, with the option that does it here. One kOk check if there are
/// none. kWarn for more than one process, and for what begins with TESSERA_ and is not known.
Checks check_launcher(const Environment& environment);

}  // namespace tessera::tools
