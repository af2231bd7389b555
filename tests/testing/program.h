// Runs a program as a person would, and says what came of it.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
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

/// `environment` is added to this process's.
inline Outcome run_program(const std::string& path, const std::vector<std::string>& arguments,
                           const std::map<std::string, std::string>& environment = {}) {
  const TempFolder folder;
  const std::string out = folder / "out", err = folder / "err";
  std::string program = std::filesystem::absolute(path).string();
  std::vector<std::string> words{program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC;
    ::dup2(::open(out.c_str(), flags, 0600), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), flags, 0600), STDERR_FILENO);
    ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  int status = 0;
  const bool ended = child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status);
  return {ended ? WEXITSTATUS(status) : -1, folder.read("out"), folder.read("err")};
}

inline Outcome run_program(const std::string& path, const Flags& flags,
                           const std::map<std::string, std::string>& environment = {}) {
  std::vector<std::string> arguments;
  for (const auto& [name, value] : flags) arguments.push_back("--" + name + "=" + value);
  return run_program(path, arguments, environment);
}

}  // namespace tessera::testing
