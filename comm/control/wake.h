// What wakes a thread that waits in poll().
#pragma once

#include <poll.h>

#include "comm/net/socket.h"

namespace tessera::comm::control {

class Wake {
 public:
  Wake();  ///< throws IoError
  /// From any thread.
  void wake() noexcept;
  pollfd to_poll() const { return {.fd = event_.get(), .events = POLLIN, .revents = 0}; }
  /// Forgets that it was woken.
  void clear();

 private:
  net::Socket event_;
};

}  // namespace tessera::comm::control
