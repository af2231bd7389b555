// This machine, as people know it.
#pragma once

#include <string>

namespace tessera::engine {

/// The name of this machine, of at most 64 bytes; "?" where it has none.
std::string host_name();

}  // namespace tessera::engine
