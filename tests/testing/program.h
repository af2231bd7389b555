// Runs programs as a person would, and says what came of them.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/testing/temp_folder.h"

namespace tessera::testing {

struct Outcome {
  int exit_code = -1;  ///< -1: it ended by a signal, or did not start
  std::string out, err;
};

/// --name=value each.
using Flags = std::map<std::string, std::string>;

/// A program that runs meanwhile. Its end kills it.
class Program {
 public:
  /// `environment` is added to this process's.
  Program(const std::string& path, const std::vector<std::string>& arguments,
          const std::map<std::string, std::string>& environment = {})
      : out_(folder_ / "out"), err_(folder_ / "err") {
    std::string program = std::filesystem::absolute(path).string();
    std::vector<std::string> words{program};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC;
    ::dup2(::open(out_.c_str(), flags, 0600), STDOUT_FILENO);
    ::dup2(::open(err_.c_str(), flags, 0600), STDERR_FILENO);
    ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  ~Program() {
    send(SIGKILL);
    wait();
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void send(int signal) const {
    if (pid_ > 0 && !status_) ::kill(pid_, signal);
  }
  bool has_ended() { return reap(WNOHANG); }
  /// Waits until it has ended.
  Outcome wait() {
    const bool ended = reap(0) && WIFEXITED(*status_);
    return {ended ? WEXITSTATUS(*status_) : -1, folder_.read("out"), folder_.read("err")};
  }

 private:
  bool reap(int options) {
    int status = 0;
    if (!status_ && pid_ > 0 && ::waitpid(pid_, &status, options) == pid_) status_ = status;
    return status_.has_value();
  }

  const TempFolder folder_;
  const std::string out_, err_;
  pid_t pid_ = -1;
  std::optional<int> status_;
};

inline std::vector<std::string> arguments_of(const Flags& flags) {
  std::vector<std::string> arguments;
  for (const auto& [name, value] : flags) arguments.push_back("--" + name + "=" + value);
  return arguments;
}

inline Outcome run_program(const std::string& path, const std::vector<std::string>& arguments,
                           const std::map<std::string, std::string>& environment = {}) {
  return Program(path, arguments, environment).wait();
}

inline Outcome run_program(const std::string& path, const Flags& flags,
                           const std::map<std::string, std::string>& environment = {}) {
  return run_program(path, arguments_of(flags), environment);
}

}  // namespace tessera::testing
