#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "comm/bootstrap/internal.h"
#include "comm/net/addresses.h"
#include "comm/net/socket.h"
#include "engine/error.h"

namespace tessera::comm::internal {
namespace {

using engine::CommError;
using engine::IoError;
using engine::require;
using net::reason;
using net::Socket;

// Connections that have not said who they are. More than these push out the oldest.
constexpr std::size_t kMaxStrangers = 64;

// Reads what is there. False if the other side has closed or failed.
bool receive_some(const Socket& socket, std::vector<std::byte>& bytes, std::size_t want) {
  std::array<std::byte, 512> buffer;
  while (bytes.size() < want) {
    const auto n = net::receive_now(
        socket, std::span(buffer).first(std::min(buffer.size(), want - bytes.size())));
    if (!n) return false;
    if (*n == 0) break;
    bytes.insert(bytes.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(*n));
  }
  return true;
}

bool send_all(const Socket& socket, std::span<const std::byte> bytes, const Participant& self) {
  while (!bytes.empty()) {
    const auto n = net::send_now(socket, bytes);
    if (!n) return false;
    bytes = bytes.subspan(*n);
    if (*n == 0 && !net::wait_for(socket, POLLOUT, self.deadline)) {
      errno = ETIMEDOUT;
      return false;
    }
  }
  return true;
}

void require_resolved(const net::Addresses& addresses, const std::string& host) {
  require<IoError>(addresses.error() == 0, "[bootstrap] expected the address of {}, got {}", host,
                   gai_strerror(addresses.error()));
}

Socket listen_at(const std::string& host, int port, const std::string& place) {
  const net::Addresses addresses(host, port, true);
  require_resolved(addresses, host);
  std::string why = "no address";
  for (const addrinfo* a = addresses.first(); a != nullptr; a = a->ai_next) {
    if (Socket socket = net::listen_at(*a)) return socket;
    why = reason();
  }
  engine::fail<IoError>("[bootstrap] expected to listen at {}, got {} (rank 0)", place, why);
}

struct Connection {
  Socket socket;
  std::vector<std::byte> heard = {};
};

// Takes what a connection says. True once it is of no more use here: it is now `ranks[r]`, or has
// said nonsense. One rank that says two different things is one too many.
bool identify(Connection& connection, std::vector<std::optional<Socket>>& ranks,
              const Participant& self, const std::string& place) {
  if (!receive_some(connection.socket, connection.heard, sizeof(Handshake))) return true;
  if (connection.heard.size() < sizeof(Handshake)) return false;
  Handshake handshake;
  std::memcpy(&handshake, connection.heard.data(), sizeof(handshake));
  if (handshake.magic != Handshake().magic) return true;
  check_handshake(handshake, handshake.rank, self, place);
  require<CommError>(handshake.rank > 0 && handshake.rank < self.size,
                     "[bootstrap] expected ranks 1 to {} at {}, got {}", self.size - 1, place,
                     handshake.rank);
  auto& rank = ranks[static_cast<std::size_t>(handshake.rank)];
  require<CommError>(!rank, "[bootstrap] expected one rank {} at {}, got two", handshake.rank,
                     place);
  rank = std::move(connection.socket);
  return true;
}

void hear(std::vector<Connection>& strangers, std::vector<std::optional<Socket>>& ranks,
          const Participant& self, const std::string& place) {
  std::erase_if(strangers, [&](Connection& c) { return identify(c, ranks, self, place); });
}

// False when nobody waits. Where the process has no descriptor left, the oldest stranger makes
// room: left in the queue, a connection would wake the next poll at once, for ever.
bool accept_one(const Socket& listener, std::vector<Connection>& strangers,
                const std::string& place) {
  for (;;) {
    Socket socket = net::accept_next(listener);
    if (socket) {
      strangers.push_back({.socket = std::move(socket)});
      return true;
    }
    if (errno != EMFILE && errno != ENFILE) return false;
    require<IoError>(!strangers.empty(),
                     "[bootstrap] expected to accept a connection at {}, got {} (rank 0)", place,
                     reason());
    strangers.erase(strangers.begin());
  }
}

void answer(const std::string& host, int port, std::span<const std::byte> message,
            const Participant& self, const std::string& place) {
  const Socket listener = listen_at(host, port, place);
  const auto size = static_cast<std::size_t>(self.size);
  std::vector<std::optional<Socket>> ranks(size);
  std::vector<Connection> strangers;
  std::size_t num_here = 1;
  while (num_here < size) {
    std::vector<pollfd> polls = {{.fd = listener.get(), .events = POLLIN, .revents = 0}};
    for (const Connection& c : strangers) {
      polls.push_back({.fd = c.socket.get(), .events = POLLIN, .revents = 0});
    }
    (void)poll(polls.data(), polls.size(), net::ms_until(self.deadline));
    hear(strangers, ranks, self, place);
    // Not all that ever come: the deadline is looked at below.
    for (std::size_t i = 0; i < kMaxStrangers && accept_one(listener, strangers, place); ++i) {
      if (strangers.size() > kMaxStrangers) hear(strangers, ranks, self, place);
      if (strangers.size() > kMaxStrangers) strangers.erase(strangers.begin());
    }
    std::vector<bool> here(size);
    for (std::size_t r = 0; r < size; ++r) here[r] = r == 0 || ranks[r];
    num_here = static_cast<std::size_t>(std::ranges::count(here, true));
    if (num_here < size && net::ms_until(self.deadline) == 0) fail_missing(here, self, place);
  }
  const auto nbytes = static_cast<std::uint32_t>(message.size());
  for (std::size_t r = 1; r < size; ++r) {
    // Named first: arguments are evaluated in no order, and reason() is one of them.
    const bool sent = send_all(*ranks[r], std::as_bytes(std::span(&nbytes, 1)), self) &&
                      send_all(*ranks[r], message, self);
    require<CommError>(sent, "[bootstrap] expected to answer rank {} at {}, got {}", r, place,
                       reason());
  }
}

// A connection to rank 0, which may not be listening yet.
Socket connect_to(const std::string& host, int port, const Participant& self,
                  const std::string& place) {
  std::string why;
  for (;;) {
    const net::Addresses addresses(host, port, false);
    require_resolved(addresses, host);
    for (const addrinfo* a = addresses.first(); a != nullptr; a = a->ai_next) {
      if (Socket socket = net::connect_to(*a, self.deadline)) return socket;
      why = reason();
    }
    require<CommError>(net::ms_until(self.deadline) > 0,
                       "[bootstrap] expected rank 0 at {} within {} ms, got {} (rank {})", place,
                       self.patience.count(), why, self.rank);
    std::this_thread::sleep_for(
        std::chrono::milliseconds(std::min(20, net::ms_until(self.deadline))));
  }
}

std::vector<std::byte> receive(const Socket& socket, std::size_t nbytes, const Participant& self,
                               const std::string& place) {
  std::vector<std::byte> bytes;
  while (bytes.size() < nbytes) {
    require<CommError>(
        net::wait_for(socket, POLLIN, self.deadline),
        "[bootstrap] expected rank 0's answer at {} within {} ms, got none (rank {})", place,
        self.patience.count(), self.rank);
    require<CommError>(receive_some(socket, bytes, nbytes),
                       "[bootstrap] expected rank 0's answer at {}, got an end (rank {})", place,
                       self.rank);
  }
  return bytes;
}

}  // namespace

std::vector<std::byte> broadcast_by_tcp(const std::string& host, int port,
                                        std::span<const std::byte> message,
                                        const Participant& self) {
  const std::string place = fmt::format("tcp:{}:{}", host, port);
  if (self.rank == 0) {
    answer(host, port, message, self, place);
    return {message.begin(), message.end()};
  }
  const Socket socket = connect_to(host, port, self, place);
  const Handshake handshake{.size = self.size, .rank = self.rank};
  const bool sent = send_all(socket, std::as_bytes(std::span(&handshake, 1)), self);
  require<CommError>(sent, "[bootstrap] expected to reach rank 0 at {}, got {} (rank {})", place,
                     reason(), self.rank);
  std::uint32_t nbytes = 0;
  std::memcpy(&nbytes, receive(socket, sizeof(nbytes), self, place).data(), sizeof(nbytes));
  require<CommError>(nbytes <= kMaxMessageNbytes,
                     "[bootstrap] expected at most {} bytes from {}, got {} (rank {})",
                     kMaxMessageNbytes, place, nbytes, self.rank);
  return receive(socket, nbytes, self, place);
}

}  // namespace tessera::comm::internal
