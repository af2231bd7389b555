#include "comm/gloo/own_address.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/net/addresses.h"
#include "comm/net/socket.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

// The number of an IP address; empty for others.
std::string number_of(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address == nullptr) return {};
  if (address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof(in));
    ::inet_ntop(AF_INET, &in.sin_addr, text, sizeof(text));
  } else if (address->sa_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, address, sizeof(in));
    // Of this link alone: without the interface it leads nowhere.
    if (!IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr)) {
      ::inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof(text));
    }
  }
  return text;
}

struct Interface {
  std::string name, address;
  bool is_loopback = false;
};

// The interfaces that are up, an address each; IPv4 first.
std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  engine::require<engine::CommError>(::getifaddrs(&list) == 0,
                                     "[gloo] expected the network's interfaces, got: {}",
                                     std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<Interface> found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family) continue;
      if ((i->ifa_flags & IFF_UP) == 0 || number_of(i->ifa_addr).empty()) continue;
      found.push_back({.name = i->ifa_name,
                       .address = number_of(i->ifa_addr),
                       .is_loopback = (i->ifa_flags & IFF_LOOPBACK) != 0});
    }
  }
  return found;
}

// Where a packet to elsewhere would come from; none is sent. Empty if there is no such route.
std::string address_of_default_route() {
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return {};
  sockaddr_in elsewhere{};
  elsewhere.sin_family = AF_INET;
  elsewhere.sin_port = htons(9);
  ::inet_pton(AF_INET, "192.0.2.1", &elsewhere.sin_addr);  // an address that nobody has
  sockaddr_in own{};
  socklen_t nbytes = sizeof(own);
  auto* address = reinterpret_cast<sockaddr*>(&own);
  const bool found =
      ::connect(fd, reinterpret_cast<sockaddr*>(&elsewhere), sizeof(elsewhere)) == 0 &&
      ::getsockname(fd, address, &nbytes) == 0;
  ::close(fd);
  return found ? number_of(address) : "";
}

// What a name stands for; none where nobody knows it.
std::vector<std::string> resolve(const std::string& name, net::Time deadline) {
  const auto addresses = net::Lookup(name, 0).wait(deadline);
  std::vector<std::string> numbers;
  if (addresses == nullptr) return numbers;
  for (const addrinfo* a = addresses->first(); a != nullptr; a = a->ai_next) {
    if (auto number = number_of(a->ai_addr); !number.empty()) numbers.push_back(std::move(number));
  }
  return numbers;
}

// Whether a socket can listen there.
bool is_own(const std::string& number) {
  sockaddr_in in{};
  sockaddr_in6 in6{};
  in.sin_family = AF_INET;
  in6.sin6_family = AF_INET6;
  const bool is_4 = ::inet_pton(AF_INET, number.c_str(), &in.sin_addr) == 1;
  if (!is_4 && ::inet_pton(AF_INET6, number.c_str(), &in6.sin6_addr) != 1) return false;
  const int fd = ::socket(is_4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool bound = is_4 ? ::bind(fd, reinterpret_cast<sockaddr*>(&in), sizeof(in)) == 0
                          : ::bind(fd, reinterpret_cast<sockaddr*>(&in6), sizeof(in6)) == 0;
  ::close(fd);
  return bound;
}

}  // namespace

std::string own_address(const std::string& host, net::Time deadline) {
  const std::vector<Interface> all = interfaces();
  if (host.empty()) {
    if (auto address = address_of_default_route(); !address.empty()) return address;
    const auto other = std::ranges::find(all, false, &Interface::is_loopback);
    return other != all.end() ? other->address : "127.0.0.1";
  }
  if (const auto named = std::ranges::find(all, host, &Interface::name); named != all.end()) {
    return named->address;
  }
  const std::vector<std::string> numbers = resolve(host, deadline);
  if (const auto own = std::ranges::find_if(numbers, is_own); own != numbers.end()) return *own;
  std::string there;
  for (const Interface& one : all) {
    there += fmt::format("{}{} ({})", there.empty() ? "" : ", ", one.name, one.address);
  }
  engine::fail("[gloo] expected an interface or an address of this machine, got {}{}; there are {}",
               host, numbers.empty() || numbers[0] == host ? "" : ", which is " + numbers[0],
               there.empty() ? "none" : there);
}

}  // namespace tessera::comm
