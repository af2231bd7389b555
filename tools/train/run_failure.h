// The error of a run that failed, with what helps to understand it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/train/flight_output.h"

namespace tessera::tools {

/// In a handler, when all ranks have ended: throws the error again, with lines below it that say
/// where `flight` was written and, when memory has run out, `memory_plan()`. What goes wrong
/// meanwhile never hides the error itself.
[[noreturn]] void rethrow_failure(FlightOutput& flight,
                                  const std::function<std::vector<std::string>()>& memory_plan);

}  // namespace tessera::tools
