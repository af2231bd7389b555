#include "comm/control/wake.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "engine/error.h"

namespace tessera::comm::control {

Wake::Wake() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const bool made = static_cast<bool>(event_);
  engine::require<engine::IoError>(made, "[control] expected a descriptor of an event, got {}",
                                   net::reason());
}

void Wake::wake() noexcept {
  const std::uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof(one));
}

void Wake::clear() {
  std::uint64_t count = 0;
  (void)!read(event_.get(), &count, sizeof(count));
}

}  // namespace tessera::comm::control
