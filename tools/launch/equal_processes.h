// Whether the processes of a launch are about to do the same.
#pragma once

#include <string>

#include "comm/process_group.h"
#include "engine/stream.h"

namespace tessera::tools {

/// Compares every rank's `text`, lines of NAME = VALUE, which [SECTION] may head as in TOML, with
/// rank 0's. Where they differ, an error of the first line that does, as both have it, else empty.
/// Collective, and equal on all ranks: whoever leaves the world before it says so cannot keep the
/// others from learning it. `stream`: of the rank's device.
std::string difference_of_processes(comm::ProcessGroup& world, const engine::Stream& stream,
                                    const std::string& text);

}  // namespace tessera::tools
