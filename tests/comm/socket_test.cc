// Where a host listens whose system is set otherwise than most.
#include "comm/net/socket.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/comm/control_processes.h"

// Of a system whose sockets of IPv6 take no IPv4 unless they ask for it (net.ipv6.bindv6only).
extern "C" int socket(int domain, int type, int protocol) noexcept {
  const int fd = static_cast<int>(::syscall(SYS_socket, domain, type, protocol));
  const int yes = 1;
  if (domain == AF_INET6 && fd >= 0)
    (void)::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof(yes));
  return fd;
}

namespace tessera::comm {
namespace {

TEST(SocketTest, TakesIPv4WhereSocketsOfIPv6TakeNone) {
  const net::Socket listener = net::listen_anywhere(0);
  ASSERT_TRUE(listener) << net::reason();
  const sockaddr_in address = loopback(net::port_of(listener));
  const net::Socket own(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  EXPECT_EQ(::connect(own.get(), to, sizeof(address)), 0) << net::reason();
}

}  // namespace
}  // namespace tessera::comm
