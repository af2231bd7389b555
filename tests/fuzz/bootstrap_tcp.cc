// What a stranger says to rank 0 (first byte even), or in its place to rank 1 (odd).
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "comm/bootstrap/bootstrap.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

constexpr std::chrono::minutes kPatience{1};
const std::vector<std::byte> kMessage = {std::byte{'h'}, std::byte{'e'}, std::byte{'l'},
                                         std::byte{'l'}, std::byte{'o'}};

sockaddr_in local(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

/// A socket that listens at `port` of this host, 0 being any, and says which; -1 if it is taken.
int listen_at(int& port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = local(port);
  socklen_t length = sizeof(address);
  const int one = 1;
  if (::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0 ||
      ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(fd, 8) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    ::close(fd);
    return -1;
  }
  port = ntohs(address.sin_port);
  return fd;
}

/// A port that nobody listens at, below those that connections take.
int free_port() {
  for (std::random_device random;;) {
    int port = 20000 + static_cast<int>(random() % 12000);
    const int fd = listen_at(port);
    if (fd < 0) continue;
    ::close(fd);
    return port;
  }
}

/// Connected to `port`, where somebody may not listen yet; -1 once it is `over`.
int connect_to(int port, const std::atomic<bool>& over) {
  const sockaddr_in address = local(port);
  while (!over) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
    ::close(fd);
    std::this_thread::yield();
  }
  return -1;
}

void say(int fd, std::string_view text) {
  (void)::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
}

std::string hear_all(int fd) {
  std::string heard;
  std::array<char, 512> buffer;
  for (ssize_t n; (n = ::recv(fd, buffer.data(), buffer.size(), 0)) > 0;) {
    heard.append(buffer.data(), static_cast<std::size_t>(n));
  }
  return heard;
}

/// A stranger says `text`; then rank 1 comes, and must hear rank 0 unless that has ended.
void speak_to_rank0(std::string_view text) {
  static const int port = free_port();
  constexpr std::string_view kRank1("TSRBOOT1\2\0\0\0\1\0\0\0", 16), kAnswer("\5\0\0\0hello", 9);
  std::atomic<bool> over = false;
  std::string heard;
  std::thread others([&] {
    const int stranger = connect_to(port, over);
    say(stranger, text);
    if (text.size() % 2 == 0) ::shutdown(stranger, SHUT_WR);
    const int rank1 = connect_to(port, over);
    say(rank1, kRank1);
    heard = hear_all(rank1);
    ::close(stranger);
    ::close(rank1);
  });
  const auto join = [&] {
    over = true;
    others.join();
  };
  try {
    comm::bootstrap("tcp:127.0.0.1:" + std::to_string(port), 0, 2, kMessage, kPatience);
  } catch (...) {
    join();
    throw;
  }
  join();
  // A stranger that says what rank 1 says is rank 1.
  promise(heard == kAnswer || text.starts_with(kRank1), "expected rank 1 to hear rank 0");
}

void speak_to_rank1(std::string_view text) {
  int port = 0;
  const int listener = listen_at(port);
  std::thread stranger([&] {
    const int fd = ::accept(listener, nullptr, nullptr);
    say(fd, text);
    ::shutdown(fd, SHUT_WR);
    hear_all(fd);
    ::close(fd);
  });
  try {
    comm::bootstrap("tcp:127.0.0.1:" + std::to_string(port), 1, 2, {}, kPatience);
  } catch (...) {
    stranger.join();
    ::close(listener);
    throw;
  }
  stranger.join();
  ::close(listener);
}

}  // namespace

const char* const kTarget = "bootstrap_tcp";

void consume(std::string_view input) {
  if (input.empty()) return;
  const std::string_view text = input.substr(1);
  if (input[0] % 2 == 0) {
    speak_to_rank0(text);
  } else {
    speak_to_rank1(text);
  }
}

}  // namespace tessera::fuzz
