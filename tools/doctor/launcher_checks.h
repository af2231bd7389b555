// What launchers and people leave in the environment, and whether it is heeded.
#pragma once

#include "tools/config/launcher_choice.h"
#include "tools/doctor/check.h"
#include "tools/machine/environment.h"

namespace tessera::tools {

/// Who has started this process, with how many others, heeded as `choice` asks for. Then every
/// variable that is set and that people may expect to count, a check each: those that are heeded,
/// and those that are not, with the option that does it here; kWarn for what begins with TESSERA_
/// and is not known. One kOk check if there is nothing to say.
Checks check_launcher(const Environment& environment,
                      LauncherChoice choice = LauncherChoice::kAuto);

}  // namespace tessera::tools
