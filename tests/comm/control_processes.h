// Processes of a job, and strangers, for tests of the control plane.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/control.h"

namespace tessera::comm {

using std::chrono::milliseconds;

/// A process that runs `fn`, which says lines to the test. To be made before the test has threads.
class Child {
 public:
  using Say = std::function<void(const std::string& line)>;

  explicit Child(const std::function<void(const Say&)>& fn) {
    std::array<int, 2> pipe{};
    EXPECT_EQ(::pipe(pipe.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(pipe[0]);
      const Say say = [fd = pipe[1]](const std::string& line) {
        const std::string text = line + "\n";
        (void)!::write(fd, text.data(), text.size());
      };
      try {
        fn(say);
      } catch (const std::exception& error) {
        say(error.what());
      }
      ::_exit(0);
    }
    ::close(pipe[1]);
    from_ = pipe[0];
  }
  ~Child() {
    end();
    if (from_ >= 0) ::close(from_);
  }
  Child(Child&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)),
        from_(std::exchange(other.from_, -1)),
        heard_(std::move(other.heard_)) {}
  Child& operator=(Child&&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  /// Kills it; it may have ended before.
  void end() {
    if (pid_ <= 0) return;
    signal(SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

  /// The next line; "(nothing)" after half a minute, "(the end)" if it has ended.
  std::string hear() {
    for (;;) {
      if (const std::size_t end = heard_.find('\n'); end != std::string::npos) {
        std::string line = heard_.substr(0, end);
        heard_.erase(0, end + 1);
        return line;
      }
      pollfd p{.fd = from_, .events = POLLIN, .revents = 0};
      if (::poll(&p, 1, 30'000) <= 0) return "(nothing)";
      std::array<char, 4096> piece;
      const ssize_t n = ::read(from_, piece.data(), piece.size());
      if (n <= 0) return "(the end)";
      heard_.append(piece.data(), static_cast<std::size_t>(n));
    }
  }

 private:
  pid_t pid_ = -1;
  int from_ = -1;
  std::string heard_;
};

/// The message of the failure of its job, when that comes.
class FailureOf {
 public:
  explicit FailureOf(Control& control) {
    control.listen({.on_failure = [said = said_](const std::string& m) { said->set_value(m); },
                    .on_pause = {}});
  }
  std::string get() {
    auto future = said_->get_future();
    const bool came = future.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
    return came ? future.get() : "no failure";
  }

 private:
  std::shared_ptr<std::promise<std::string>> said_ = std::make_shared<std::promise<std::string>>();
};

/// Until `done()`, or for a minute.
inline void wait_until(const std::function<bool()>& done) {
  for (int i = 0; i < 60'000 && !done(); ++i) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(done());
}

/// A process that joins, says "joined", and does `body`.
inline Child child_of(const ControlOptions& options,
                      const std::function<void(Control&, const Child::Say&)>& body) {
  return Child([=](const Child::Say& say) {
    ControlOptions own = options;
    own.on_refused = [&](const std::string& note) { say(note); };
    const auto control = Control::join(own);
    say("joined");
    body(*control, say);
  });
}

inline sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

/// A socket that listens on this host, and its port.
inline std::pair<int, int> listen_here() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof(address);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(::listen(fd, 8), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  return {fd, ntohs(address.sin_port)};
}

/// A port at which nobody listens, nor at the 15 that follow; no other test on this machine gets
/// them while this one runs, and no job of a launcher looks there.
inline int free_port() {
  static int next = ::getpid();
  for (;; ++next) {
    const int block = next % 600, port = 10000 + 16 * block;
    // Kept until this process and those that it makes have ended.
    const int taken = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un name{.sun_family = AF_UNIX, .sun_path = {}};
    std::snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "tessera-test-ports-%d", block);
    if (::bind(taken, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0) {
      ++next;
      bool is_free = true;
      for (int k = 0; k < 16 && is_free; ++k) {
        const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
        const sockaddr_in address = loopback(port + k);
        is_free = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
        ::close(fd);
      }
      if (is_free) return port;
    }
    ::close(taken);
  }
}

/// Connected to `port`, where somebody may not listen yet.
inline int connect_to(int port) {
  for (;;) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = loopback(port);
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
    ::close(fd);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

inline void say_to(int fd, std::string_view text) {
  (void)::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
}

inline std::string tcp() { return "tcp:127.0.0.1:" + std::to_string(free_port()); }

inline ControlOptions options_of(const std::string& address, int process, int num_processes,
                                 milliseconds deadline = std::chrono::hours(1)) {
  return {.process = process,
          .num_processes = num_processes,
          .address = address,
          .job = "j",
          .deadline = deadline};
}

/// All processes of a job, which do `body`, and have said that they joined.
inline std::vector<Child> job_of(int num_processes, const std::string& address,
                                 const std::function<void(Control&, const Child::Say&)>& body,
                                 milliseconds deadline = std::chrono::hours(1)) {
  std::vector<Child> children;
  for (int p = 0; p < num_processes; ++p) {
    children.push_back(child_of(options_of(address, p, num_processes, deadline), body));
  }
  for (Child& child : children) EXPECT_EQ(child.hear(), "joined");
  return children;
}

}  // namespace tessera::comm
