#include "comm/net/addresses.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>
#include <utility>

namespace tessera::comm::net {

Addresses::Addresses(const std::string& host, int port, bool to_listen)
    : error_([&] {
        addrinfo hints{};
        hints.ai_family = AF_UNSPEC;
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_NUMERICSERV | (to_listen ? AI_PASSIVE : 0);
        return getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first_);
      }()) {}

Addresses::~Addresses() {
  if (first_ != nullptr) freeaddrinfo(first_);
}

void Addresses::set_port(int port) {
  const in_port_t in_order = htons(static_cast<in_port_t>(port));
  for (addrinfo* a = first_; a != nullptr; a = a->ai_next) {
    if (a->ai_family == AF_INET) reinterpret_cast<sockaddr_in*>(a->ai_addr)->sin_port = in_order;
    if (a->ai_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(a->ai_addr)->sin6_port = in_order;
  }
}

Lookup::Lookup(const std::string& host, int port) : host_(host) {
  std::packaged_task<std::shared_ptr<Addresses>()> look_up(
      [host, port] { return std::make_shared<Addresses>(host, port, /*to_listen=*/false); });
  addresses_ = look_up.get_future().share();
  std::thread(std::move(look_up)).detach();
}

std::shared_ptr<Addresses> Lookup::wait(std::chrono::steady_clock::time_point deadline) const {
  const bool are_there = addresses_.wait_until(deadline) == std::future_status::ready;
  return are_there ? addresses_.get() : nullptr;
}

}  // namespace tessera::comm::net
