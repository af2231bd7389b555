// The error of a run that failed, with what helps to understand it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/report/flight_output.h"
#include "tools/report/rank_errors.h"

namespace tessera::tools {

/// In a handler, when all ranks have ended: throws the error again, with the ranks that had it in
/// front, as `errors` knows, and with lines below it that say where `flight` was written and, when
/// memory has run out, `memory_plan()`. What goes wrong meanwhile never hides the error itself.
/// Before the first step (`has_begun` is false) arguments and files that are refused are an error
/// of their own, which no rank's calls explain, and so is what keeps processes from meeting:
/// `flight` is not written then.
[[noreturn]] void rethrow_failure(FlightOutput& flight, const RankErrors& errors, bool has_begun,
                                  const std::function<std::vector<std::string>()>& memory_plan);

}  // namespace tessera::tools
