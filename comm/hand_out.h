// What process 0 tells the others where a transport connects them already: for
// ControlOptions::hand_out, of processes that are told no address where they meet.
#pragma once

#include <string>

#include "comm/control/control.h"
#include "comm/transport/transport.h"

namespace tessera::comm {

/// Throws InvalidArgument unless `transport` has the processes that `self` says.
void check_processes(const Transport& transport, const ControlOptions& self);

/// Process 0's `own`, of at most 4096 bytes, over `transport`, on every process. Collective, and
/// nothing else goes over the transport meanwhile. Throws as check_processes(); InvalidArgument
/// where `own` is longer; CommError where a process is not heard of within the deadline of `self`.
std::string hand_out(Transport& transport, const ControlOptions& self, const std::string& own);

}  // namespace tessera::comm
