// Real processes for tests of transports: forked, each with a connection to the test, through which
// they gather texts once and say how they fared.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport/transport.h"

namespace tessera::comm {

class ForkedProcesses {
 public:
  /// What one process does. What it returns, or the text of what it throws, is its outcome().
  using Work = std::function<std::string(int process, const AllGatherTexts& all_gather)>;

  /// A process that has not ended after four minutes is killed. The caller has no other threads.
  ForkedProcesses(int num_processes, const Work& work)
      : num_processes_(static_cast<std::size_t>(num_processes)) {
    for (int p = 0; p < num_processes; ++p) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::terminate();
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(240);
        say(ends[1], run(work, p, ends[1]));
        ::_exit(0);
      }
      ::close(ends[1]);
      children_.push_back({child, ends[0]});
    }
  }
  ~ForkedProcesses() {
    for (const Child& child : children_) {
      ::kill(child.pid, SIGKILL);
      ::waitpid(child.pid, nullptr, 0);
      ::close(child.fd);
    }
  }
  ForkedProcesses(const ForkedProcesses&) = delete;
  ForkedProcesses& operator=(const ForkedProcesses&) = delete;

  /// Carries out their all-gather, in which each takes part.
  void gather() {
    std::vector<std::string> texts;
    for (const Child& child : children_) texts.push_back(hear(child.fd));
    for (const Child& child : children_) {
      for (const std::string& text : texts) say(child.fd, text);
    }
  }

  /// What a process returned; "gone" if it ended before.
  std::string outcome(int process) const { return hear(at(process).fd); }
  std::vector<std::string> outcomes() const {
    std::vector<std::string> all;
    for (const Child& child : children_) all.push_back(hear(child.fd));
    return all;
  }

  /// Waits until a process has stopped itself by SIGSTOP.
  void wait_until_stopped(int process) const { ::waitpid(at(process).pid, nullptr, WUNTRACED); }
  void kill(int process) const { ::kill(at(process).pid, SIGKILL); }

 private:
  struct Child {
    pid_t pid;
    int fd;
  };

  const Child& at(int process) const { return children_[static_cast<std::size_t>(process)]; }

  std::string run(const Work& work, int process, int fd) const {
    const AllGatherTexts all_gather = [&](const std::string& own) {
      say(fd, own);
      std::vector<std::string> texts(1, hear(fd));
      while (texts.size() < num_processes_) texts.push_back(hear(fd));
      return texts;
    };
    try {
      return work(process, all_gather);
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  static void say(int fd, const std::string& text) {
    const std::uint64_t nbytes = text.size();
    (void)!::send(fd, &nbytes, sizeof(nbytes), MSG_NOSIGNAL);
    (void)!::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
  }

  static std::string hear(int fd) {
    std::uint64_t nbytes = 0;
    if (::recv(fd, &nbytes, sizeof(nbytes), MSG_WAITALL) != sizeof(nbytes)) return "gone";
    std::string text(nbytes, '\0');
    const auto come = ::recv(fd, text.data(), nbytes, MSG_WAITALL);
    return come == static_cast<ssize_t>(nbytes) ? text : "gone";
  }

  std::size_t num_processes_;
  std::vector<Child> children_;
};

}  // namespace tessera::comm
