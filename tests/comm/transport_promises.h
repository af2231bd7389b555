// What every transport promises, as checks that run in every process of its world.
#pragma once

#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace tessera::comm {

/// What `transport` does not hold of what comm/transport/transport.h says, each in a sentence.
/// Empty is good. Collective: each process calls it once, as the last thing it does with the
/// transport, for it ends with messages of wrong lengths. A message that does not come is missed
/// after a minute.
std::vector<std::string> broken_promises(Transport& transport);

}  // namespace tessera::comm
