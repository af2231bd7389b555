// What processes say to each other of emulated communicators.
//
// [Note: NCCL between processes] The process that makes a unique id listens at a socket which the
// id names, and has the clique: it is the hub of the others. For each rank elsewhere it has a
// guest, a communicator whose work is done by threads of nccl_guests.cc on copies in its own
// memory. A rank elsewhere keeps one connection, on which it hears that all have joined or what
// failed, and says that it leaves; and opens one for each operation, which carries inputs there and
// results back. So whoever is killed is lost as with the real one: its connections end.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "tests/emulator/nccl_internal.h"

namespace tessera::cuda_emulation::wire {

// What a connection begins with.
struct Request {
  std::uint64_t clique;
  std::uint64_t number;  // of a collective
  int num_ranks, rank, gpu;
  int num_args;  // 0: it joins
};

struct WireArgs {
  NcclKind kind;
  ncclDataType_t type;
  std::size_t count;
  int peer;
  bool sends, receives;
};

// What an operation ends with, before results or the text of what it threw.
struct Reply {
  bool has_thrown;
  std::size_t nbytes;  // of the text
};

inline bool send_all(int fd, const void* bytes, std::size_t nbytes) {
  const auto* p = static_cast<const std::byte*>(bytes);
  while (nbytes > 0) {
    const ssize_t n = ::send(fd, p, nbytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    p += n;
    nbytes -= static_cast<std::size_t>(n);
  }
  return true;
}

inline bool receive_all(int fd, void* bytes, std::size_t nbytes) {
  auto* p = static_cast<std::byte*>(bytes);
  while (nbytes > 0) {
    const ssize_t n = ::recv(fd, p, nbytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    p += n;
    nbytes -= static_cast<std::size_t>(n);
  }
  return true;
}

template <class T>
bool send_all(int fd, const T& value) {
  return send_all(fd, &value, sizeof(value));
}
template <class T>
bool receive_all(int fd, T& value) {
  return receive_all(fd, &value, sizeof(value));
}

class Connection {
 public:
  explicit Connection(int fd) : fd_(fd) {}
  ~Connection() {
    if (fd_ >= 0) ::close(fd_);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// In the abstract namespace: there is no file that a killed process would leave.
inline std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

}  // namespace tessera::cuda_emulation::wire
