// What the last calls of all ranks say about why they hang or have failed.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/flight/flight_file.h"

namespace tessera::tools {

enum class FlightFinding {
  kDiffer,      ///< ranks called different things under one number
  kLate,        ///< ranks waited for others that had not come
  kUnfinished,  ///< a call was not finished, though no rank was late for it
  kFinished,    ///< nobody waited for anybody
};

struct FlightVerdict {
  FlightFinding finding = FlightFinding::kFinished;
  std::vector<std::string> lines;  ///< what happened, the cause first; names are not escaped
};

/// Of the ranks of one world, each in one of `files`. Throws IoError naming the files if they are
/// of different worlds or have a rank twice.
FlightVerdict judge(std::span<const FlightFile> files);

}  // namespace tessera::tools
