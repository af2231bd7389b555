// What the doctor says of the flight recordings of a run that failed.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/flight/flight_verdict.h"

namespace tessera::tools {

/// --flight FILE FILE ... as one --flight=FILE\nFILE..., which a FlagSet takes. Throws
/// InvalidArgument for a --flight without a file.
std::vector<std::string> join_flight_files(std::span<const char* const> arguments);

struct FlightReport {
  FlightFinding finding;
  std::string text;  ///< lines for a terminal, or one JSON object
};
/// Reads `files`, paths between line breaks. Throws IoError naming the one that cannot be believed.
FlightReport report_flight(const std::string& files, bool json);

}  // namespace tessera::tools
