// What names of hosts stand for.
#pragma once

#include <netdb.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>

namespace tessera::comm::net {

/// What a name stands for. May wait for a name server as long as the system's settings say.
class Addresses {
 public:
  /// `flags`: those of getaddrinfo(), AI_PASSIVE for addresses to listen at.
  Addresses(const std::string& host, int port, int flags);
  ~Addresses();
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  /// 0, or what getaddrinfo() returned.
  int error() const { return error_; }
  const addrinfo* first() const { return first_; }
  /// Of all of them.
  void set_port(int port);

 private:
  addrinfo* first_ = nullptr;
  const int error_;
};

/// Addresses to connect to. Of a name a thread of its own asks for them, which may outlive this; a
/// number is one at once.
class Lookup {
 public:
  /// Throws std::system_error where no thread can be started.
  Lookup(const std::string& host, int port);
  const std::string& host() const { return host_; }
  /// Null until they are there, or a `deadline` has come.
  std::shared_ptr<Addresses> wait(std::chrono::steady_clock::time_point deadline) const;

 private:
  std::string host_;
  std::shared_future<std::shared_ptr<Addresses>> addresses_;
};

}  // namespace tessera::comm::net
