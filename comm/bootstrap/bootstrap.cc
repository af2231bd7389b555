#include "comm/bootstrap/bootstrap.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/bootstrap/internal.h"
#include "comm/net/socket.h"
#include "engine/error.h"

namespace tessera::comm {

using engine::CommError;
using engine::require;

namespace internal {

void check_handshake(const Handshake& handshake, int rank, const Participant& self,
                     std::string_view place) {
  require<CommError>(handshake.magic == Handshake().magic && handshake.rank == rank,
                     "[bootstrap] expected rank {} at {}, got something else", rank, place);
  require<CommError>(handshake.size == self.size,
                     "[bootstrap] expected rank {} of {} at {}, got rank {} of {}", rank, self.size,
                     place, handshake.rank, handshake.size);
}

void fail_missing(const std::vector<bool>& here, const Participant& self, std::string_view place) {
  std::string missing;
  for (std::size_t r = 0; r < here.size(); ++r) {
    if (!here[r]) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
  }
  engine::fail<CommError>(
      "[bootstrap] expected {} ranks at {} within {} ms, got {}: missing {} (rank {})", self.size,
      place, self.patience.count(), std::count(here.begin(), here.end(), true), missing, self.rank);
}

}  // namespace internal

std::vector<std::byte> bootstrap(std::string_view address, int rank, int size,
                                 std::vector<std::byte> message,
                                 std::chrono::milliseconds deadline) {
  constexpr std::string_view kFile = "file:", kTcp = "tcp:";
  require(size >= 1 && rank >= 0 && rank < size, "[bootstrap] expected a rank in [0, {}), got {}",
          size, rank);
  require(message.size() <= internal::kMaxMessageNbytes,
          "[bootstrap] expected at most {} bytes, got {}", internal::kMaxMessageNbytes,
          message.size());
  const auto patience = std::min<std::chrono::milliseconds>(deadline, std::chrono::years(100));
  const internal::Participant self{rank, size, patience,
                                   std::chrono::steady_clock::now() + patience};
  if (address.starts_with(kFile)) {
    const std::string path(address.substr(kFile.size()));
    require(!path.empty() && path.find('\0') == std::string::npos,
            "[bootstrap] expected file:PATH, got '{}' (rank {})", address, rank);
    return internal::broadcast_by_file(path, message, self);
  }
  const auto place = net::parse_host_port(
      address.starts_with(kTcp) ? address.substr(kTcp.size()) : std::string_view(), false);
  require(place.has_value(), "[bootstrap] expected file:PATH or tcp:HOST:PORT, got '{}' (rank {})",
          address, rank);
  return internal::broadcast_by_tcp(place->host, place->port, message, self);
}

}  // namespace tessera::comm
