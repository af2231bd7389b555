#include "comm/net/socket.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <memory>

#include "comm/net/addresses.h"
#include "engine/error.h"

namespace tessera::comm::net {
namespace {

constexpr int kFlags = SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr int kMaxQueued = 128;  // connections that wait to be accepted

// The end of a connection.
struct End {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
  std::pair<std::string, std::string> host_and_port() {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    const bool known = getnameinfo(get(), length, host.data(), host.size(), port.data(),
                                   port.size(), NI_NUMERICHOST | NI_NUMERICSERV) == 0;
    if (!known) return {};
    std::string_view text = host.data();
    constexpr std::string_view kMapped = "::ffff:";  // IPv4 on a socket for both
    if (text.starts_with(kMapped)) text.remove_prefix(kMapped.size());
    return {std::string(text), port.data()};
  }
};

// Takes a number in [min, max] from the start of `text`.
std::optional<int> take_number(std::string_view& text, int min, int max) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < min || number > max) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

// Whether an IPv6 socket takes connections of IPv4 as well, whatever the system's default.
bool take_both(const Socket& socket) {
  const int no = 0;
  return setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no)) == 0;
}

Socket listen_at(const addrinfo& address) {
  Socket socket(::socket(address.ai_family, address.ai_socktype | kFlags, 0));
  const int one = 1;
  if (socket && (address.ai_family != AF_INET6 || take_both(socket)) &&
      setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 &&
      bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 &&
      listen(socket.get(), kMaxQueued) == 0) {
    return socket;
  }
  return Socket();
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) (void)close(fd_);
}

std::optional<HostPort> parse_host_port(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  std::string_view host = text.substr(0, colon), rest = text.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const auto port = take_number(rest, 1, 65535);
  if (!port || host.empty() || host.find('\0') != std::string_view::npos) return std::nullopt;
  HostPort result{std::string(host), *port};
  if (rest.starts_with('+')) {
    rest.remove_prefix(1);
    const auto num_more = take_number(rest, 0, std::min(1000, 65535 - *port));
    if (!num_more) return std::nullopt;
    result.num_more = *num_more;
  }
  if (!rest.empty()) return std::nullopt;
  return result;
}

std::string reason() { return std::strerror(errno); }

int ms_until(Time deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1'000'000));
}

bool wait_for(const Socket& socket, short events, Time deadline) {
  pollfd p{.fd = socket.get(), .events = events, .revents = 0};
  for (;;) {
    const int n = poll(&p, 1, ms_until(deadline));
    if (n > 0) return true;
    if (ms_until(deadline) == 0) return false;
  }
}

Socket listen_anywhere(int port) {
  // An address of IPv6 alone takes both kinds of connections, where the system has it.
  for (const char* const any : {"::", "0.0.0.0"}) {
    const Addresses addresses(any, port, AI_PASSIVE);
    if (addresses.error() != 0) continue;
    if (Socket socket = listen_at(*addresses.first())) return socket;
    if (errno == EADDRINUSE || errno == EACCES || errno == EMFILE) break;
  }
  return Socket();
}

Socket accept_next(const Socket& listener) {
  return Socket(accept4(listener.get(), nullptr, nullptr, kFlags));
}

Socket connect_to(const addrinfo& address, Time deadline) {
  Socket socket(::socket(address.ai_family, address.ai_socktype | kFlags, 0));
  if (!socket || connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return socket;
  int error = errno;
  if (error == EINPROGRESS && wait_for(socket, POLLOUT, deadline)) {
    socklen_t length = sizeof(error);
    (void)getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0) return socket;
  socket = Socket();
  errno = error == EINPROGRESS ? ETIMEDOUT : error;
  return socket;
}

std::pair<Socket, Socket> connected_pair() {
  int fds[2] = {-1, -1};
  const bool made = socketpair(AF_UNIX, SOCK_STREAM | kFlags, 0, fds) == 0;
  engine::require<engine::IoError>(made, "[net] expected a pair of sockets, got {}", reason());
  return {Socket(fds[0]), Socket(fds[1])};
}

void set_for_messages(const Socket& socket, std::chrono::milliseconds user_timeout) {
  const int one = 1;
  (void)setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  const auto ms = static_cast<unsigned>(user_timeout.count());
  (void)setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms));
}

std::optional<std::size_t> send_now(const Socket& socket, std::span<const std::byte> bytes) {
  for (;;) {
    const ssize_t n = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n >= 0) return static_cast<std::size_t>(n);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return std::nullopt;
  }
}

std::optional<std::size_t> receive_now(const Socket& socket, std::span<std::byte> bytes) {
  for (;;) {
    const ssize_t n = recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (n > 0) return static_cast<std::size_t>(n);
    if (n == 0) errno = 0;
    if (n == 0) return std::nullopt;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return std::nullopt;
  }
}

bool is_local(const Socket& connection) {
  End own, peer;
  if (getsockname(connection.get(), own.get(), &own.length) != 0 ||
      getpeername(connection.get(), peer.get(), &peer.length) != 0) {
    return false;
  }
  if (own.address.ss_family == AF_UNIX) return true;
  // What comes from an address of this host can only come from it: the system drops the rest.
  const std::string from = peer.host_and_port().first;
  return !from.empty() &&
         (from == own.host_and_port().first || from.starts_with("127.") || from == "::1");
}

int port_of(const Socket& socket) {
  End own;
  if (getsockname(socket.get(), own.get(), &own.length) != 0) return 0;
  std::string_view port;
  const std::string text = own.host_and_port().second;
  port = text;
  return take_number(port, 0, 65535).value_or(0);
}

std::string peer_text(const Socket& connection) {
  End peer;
  if (getpeername(connection.get(), peer.get(), &peer.length) != 0) return "a closed connection";
  if (peer.address.ss_family == AF_UNIX) return "this process";
  const auto [host, port] = peer.host_and_port();
  return host.find(':') == std::string::npos ? host + ":" + port
                                             : fmt::format("[{}]:{}", host, port);
}

std::vector<std::string> own_addresses() {
  ifaddrs* first = nullptr;
  std::vector<std::string> own, loopback;
  if (getifaddrs(&first) != 0) first = nullptr;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, [](ifaddrs* p) {
    if (p != nullptr) freeifaddrs(p);
  });
  for (const ifaddrs* a = first; a != nullptr; a = a->ifa_next) {
    if (a->ifa_addr == nullptr || (a->ifa_flags & IFF_UP) == 0) continue;
    const int family = a->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    End end;
    end.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&end.address, a->ifa_addr, end.length);
    const std::string host = end.host_and_port().first;
    if (host.empty() || host.find('%') != std::string::npos) continue;  // of one link alone
    ((a->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : own).push_back(host);
  }
  own.insert(own.end(), loopback.begin(), loopback.end());
  return own;
}

}  // namespace tessera::comm::net
