// That the processes of a launch are about to do the same.
#pragma once

#include <string>

#include "comm/process_group.h"

namespace tessera::tools {

/// Compares every rank's `text`, lines of NAME = VALUE, which [SECTION] may head as in TOML, with
/// rank 0's. Collective: where they differ all ranks throw InvalidArgument, with the first line
/// that differs as both have it.
void check_equal_processes(comm::ProcessGroup& world, const std::string& text);

}  // namespace tessera::tools
