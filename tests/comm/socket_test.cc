// Where a host listens whose system is set otherwise than most.
#include "comm/net/socket.h"

#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstring>
#include <fstream>
#include <string>

#include "tests/comm/control_processes.h"

namespace tessera::comm {
namespace {

// A network of this process alone, whose sockets of IPv6 take no IPv4 unless they ask for it.
bool enter_network_of_ipv6_alone() {
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  std::ofstream setting("/proc/sys/net/ipv6/bindv6only");
  setting << "1" << std::flush;
  ifreq loopback{};
  std::strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP | IFF_RUNNING;
  const net::Socket any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return setting.good() && ::ioctl(any.get(), SIOCSIFFLAGS, &loopback) == 0;
}

TEST(SocketTest, TakesIPv4WhereSocketsOfIPv6TakeNone) {
  Child child([](const Child::Say& say) {
    if (!enter_network_of_ipv6_alone()) return say("no network");
    const net::Socket listener = net::listen_anywhere(4711);
    const sockaddr_in address = loopback(4711);
    const net::Socket own(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto* const to = reinterpret_cast<const sockaddr*>(&address);
    say(::connect(own.get(), to, sizeof(address)) == 0 ? "connected" : net::reason());
  });
  const std::string said = child.hear();
  if (said == "no network") GTEST_SKIP() << "this system gives no network of one's own";
  EXPECT_EQ(said, "connected");
}

}  // namespace
}  // namespace tessera::comm
