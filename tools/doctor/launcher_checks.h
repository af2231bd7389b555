// What launchers and people leave in the environment, and whether it is heeded.
#pragma once

#include "tools/doctor/check.h"
#include "tools/machine/environment.h"

namespace tessera::tools {

/// Who has started this process: kWarn if it is one of several. Then every variable that is set and
/// that people may expect to count, a check each: those that are heeded, and those that are not,
/// with the option that does it here; kWarn for what begins with TESSERA_ and is not known. One kOk
/// check if there is nothing to say.
Checks check_launcher(const Environment& environment);

}  // namespace tessera::tools
