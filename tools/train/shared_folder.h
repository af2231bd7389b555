// Whether all hosts of a run see one folder.
#pragma once

#include <string>

#include "comm/process_group.h"
#include "engine/memory.h"
#include "engine/stream.h"

namespace tessera::tools {

/// Collective: rank 0 leaves a file in `folder`, which all others must find there within seconds.
/// Throws IoError on all ranks, with rank and host of one that does not. Where rank 0 cannot write
/// nothing is said: whoever writes there next says it better. `memory` is of the device of
/// `stream`.
void check_shared_folder(comm::ProcessGroup& world, const std::string& folder,
                         const engine::Memory& memory, const engine::Stream& stream);

}  // namespace tessera::tools
