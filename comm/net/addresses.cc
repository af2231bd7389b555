#include "comm/net/addresses.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>
#include <utility>

namespace tessera::comm::net {

Addresses::Addresses(const std::string& host, int port, int flags)
    : error_([&] {
        addrinfo hints{};
        hints.ai_family = AF_UNSPEC;
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_NUMERICSERV | flags;
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
  const auto look_up = [host, port](int flags) {
    return std::make_shared<Addresses>(host, port, flags);
  };
  auto number = look_up(AI_NUMERICHOST);
  const bool is_name = number->error() != 0;
  std::packaged_task<std::shared_ptr<Addresses>()> task(
      [=] { return is_name ? look_up(0) : number; });
  addresses_ = task.get_future().share();
  if (is_name) {
    std::thread(std::move(task)).detach();
  } else {
    task();
  }
}

std::shared_ptr<Addresses> Lookup::wait(std::chrono::steady_clock::time_point deadline) const {
  const bool are_there = addresses_.wait_until(deadline) == std::future_status::ready;
  return are_there ? addresses_.get() : nullptr;
}

}  // namespace tessera::comm::net
