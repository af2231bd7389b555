// How a process comes to a connection with process 0, on which that has said Go.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/control/connection.h"
#include "comm/control/control.h"
#include "comm/control/place.h"

namespace tessera::comm::control {

struct Joined {
  Connection connection;
  std::vector<std::string> names;  ///< of all processes
};

Hello hello_of(const ControlOptions& options);
/// Any process but 0. Throws as Control::join(). With `why_not` it tells that instead of joining,
/// and throws in any case.
Joined join_at(Place& place, const ControlOptions& options, std::string_view why_not = "");
/// Process 0, over a connection within it.
Joined join_here(net::Socket socket, const std::string& secret, const ControlOptions& options);

}  // namespace tessera::comm::control
