// How a process comes to a connection with process 0, on which that has said Go.
#pragma once

#include <string>
#include <vector>

#include "comm/control/connection.h"
#include "comm/control/control.h"
#include "comm/control/place.h"

namespace tessera::comm::control {

struct Joined {
  Connection connection;
  std::vector<std::string> names;  ///< of all processes
};

/// Any process but 0. Throws as Control::join().
Joined join_at(Place& place, const ControlOptions& options);
/// Process 0, over a connection within it.
Joined join_here(net::Socket socket, const std::string& secret, const ControlOptions& options);

}  // namespace tessera::comm::control
