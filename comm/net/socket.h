// Sockets as a process uses them that waits for many with a deadline: they never block, raise no
// SIGPIPE, and are closed in programs that this one starts.
#pragma once

#include <netdb.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::comm::net {

using Time = std::chrono::steady_clock::time_point;

/// A descriptor that is closed in the end; below 0: none.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// "HOST:PORT", or "HOST:PORT+N": N further ports after PORT.
struct HostPort {
  std::string host;  ///< without the brackets around an address of IPv6
  int port = 0, num_more = 0;
};
/// Nothing if `text` is something else.
std::optional<HostPort> parse_host_port(std::string_view text);

std::string reason();  ///< what errno says

/// Until then; not below 0.
int ms_until(Time deadline);
/// False at the deadline.
bool wait_for(const Socket& socket, short events, Time deadline);

/// Listens at every address of this host. Where that fails, there is no socket, and errno says why.
Socket listen_anywhere(int port);
/// The next who connects; no socket, and errno, if there is none.
Socket accept_next(const Socket& listener);
/// A connection, or no socket, and errno, if there is none until the deadline.
Socket connect_to(const addrinfo& address, Time deadline);
/// Both ends of a connection within this process. Throws IoError.
std::pair<Socket, Socket> connected_pair();

/// Small messages leave at once, and what the peer does not acknowledge for so long ends the
/// connection. Does nothing to a socket that is not TCP.
void set_for_messages(const Socket& socket, std::chrono::milliseconds user_timeout);

/// Sends or takes what it can without waiting, and returns how much; nothing at the end of the
/// stream (errno 0) or if the connection is broken.
std::optional<std::size_t> send_now(const Socket& socket, std::span<const std::byte> bytes);
std::optional<std::size_t> receive_now(const Socket& socket, std::span<std::byte> bytes);

/// Whether both ends are on this host.
bool is_local(const Socket& connection);
/// The port that `socket` is bound to.
int port_of(const Socket& socket);
/// "10.0.0.3:4711", for messages.
std::string peer_text(const Socket& connection);
/// This host's addresses as numbers, those that only it can reach last.
std::vector<std::string> own_addresses();

}  // namespace tessera::comm::net
