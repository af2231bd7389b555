// Where several processes of a launch meet, and what their launcher calls them together.
#pragma once

#include "tools/launch/launcher.h"
#include "tools/launch/variable_reader.h"

namespace tessera::tools {

/// Sets address, job, has_mpi and has_pmi of `launch`, whose numbers are known, and adds to its
/// notes. Throws as find_launch().
void find_meeting_place(const VariableReader& reader, Launch& launch);

}  // namespace tessera::tools
