// compare --find-divergence: trains two configurations, or reads the records of two runs, and says
// where they part.
#pragma once

#include "tools/compare/request/request.h"
#include "tools/probe/divergence_report.h"

namespace tessera::tools {

/// Trains what has to be trained, and if something differs trains it again up to there for the
/// values. Writes divergence.json and what the trainings leave below the output folder. Throws
/// IoError for a record, file or program that cannot be, InvalidArgument for runs that cannot be
/// compared, and for a training that failed without a difference before.
DivergenceResult find_divergence(const Request& request);

}  // namespace tessera::tools
