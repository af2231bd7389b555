#include "comm/net/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "engine/error.h"

namespace tessera::comm::net {

void draw(std::span<std::byte> bytes) {
  // Up to 256 bytes come whole or not at all.
  const bool drawn = getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  engine::require<engine::IoError>(drawn, "[net] expected {} random bytes, got {}", bytes.size(),
                                   std::strerror(errno));
}

}  // namespace tessera::comm::net
