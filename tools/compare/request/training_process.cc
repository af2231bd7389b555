#include "tools/compare/request/training_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <thread>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/cli/flags.h"
#include "tools/cli/stop.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

// In the new process: calls only what may be called between fork and exec. Ends it.
[[noreturn]] void become(const char* path, char* const* argv, bool has_group, int console,
                         int error_pipe, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (has_group) ::setpgid(0, 0);
  if (::getppid() != parent) ::_exit(127);  // it died before
  const int none = ::open("/dev/null", O_RDONLY);
  if (none >= 0 && ::dup2(none, STDIN_FILENO) >= 0 && ::dup2(console, STDOUT_FILENO) >= 0 &&
      ::dup2(console, STDERR_FILENO) >= 0) {
    ::signal(SIGPIPE, SIG_DFL);
    ::signal(SIGXFSZ, SIG_DFL);
    ::execv(path, argv);
  }
  const int error = errno;
  [[maybe_unused]] const auto written = ::write(error_pipe, &error, sizeof(error));
  ::_exit(127);
}

ProcessEnd wait_for(pid_t child, bool has_group) {
  bool has_asked = false;
  while (true) {
    int status = 0;
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) {
      if (WIFEXITED(status)) return {.exit_code = WEXITSTATUS(status)};
      return {.exit_code = -1, .signal = WTERMSIG(status)};
    }
    require<IoError>(ended == 0 || errno == EINTR, "[trainer] expected to wait for it, got {}",
                     std::strerror(errno));
    // A terminal asks both of them: two signals within kSameRequest are one request. A launcher is
    // told so that it ends: srun only answers the first SIGINT, and takes a second for an abort.
    if (stop_requested() != 0 && !has_asked) {
      ::kill(has_group ? -child : child, has_group ? SIGTERM : stop_requested());
      has_asked = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

std::vector<pid_t> children() {
  std::vector<pid_t> pids;
  std::error_code none;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", none)) {
    std::ifstream file(task.path() / "children");
    for (pid_t pid = 0; file >> pid;) pids.push_back(pid);
  }
  return pids;
}

// Ends whom a launcher that has ended leaves, in whatever process group: they are children of this
// process then, a subreaper, which has no others.
void end_leftovers() {
  constexpr std::chrono::milliseconds kSleep(10);
  constexpr std::chrono::seconds kUntilKilled(10), kUntilLeft(20);
  std::set<pid_t> asked;
  for (std::chrono::milliseconds slept(0); slept < kUntilLeft; slept += kSleep) {
    const pid_t ended = ::waitpid(-1, nullptr, WNOHANG);
    if (ended < 0 && errno != EINTR) return;
    if (ended != 0) continue;
    for (const pid_t pid : children()) {
      if (asked.insert(pid).second) ::kill(pid, SIGTERM);
      if (slept >= kUntilKilled) ::kill(pid, SIGKILL);
    }
    std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace

std::string ProcessEnd::str() const {
  if (signal == 0) return fmt::format("exit code {}", exit_code);
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

std::string program_path(const std::string& program) {
  std::error_code error;
  const std::string path = std::filesystem::absolute(with_home(program), error).string();
  require<IoError>(!error && ::access(path.c_str(), X_OK) == 0,
                   "[trainer] expected a program, which `bazel run //tools:compare` supplies, got "
                   "none ({})",
                   path);
  return path;
}

namespace {

bool is_locked(const std::string& path) {
  const engine::FileDescriptor file(
      ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  return file.is_open() && engine::try_lock(file) == engine::Lock::kHeldByAnother;
}

}  // namespace

void wait_for_folder(const std::string& folder, std::chrono::milliseconds patience) {
  const auto is_in_use = [&] {
    return is_locked(folder + "/.lock") || is_locked(folder + "/log.jsonl");
  };
  if (!is_in_use()) return;
  fmt::print(stderr, "warning: waiting for an earlier training to end, which still writes to {}\n",
             engine::escaped(folder));
  constexpr std::chrono::milliseconds kSleep(20);
  for (; is_in_use() && stop_requested() == 0; patience -= kSleep) {
    require<IoError>(patience.count() > 0,
                     "[trainer] expected an earlier training to end, got one that still writes: "
                     "end it, and go on with --resume ({})",
                     folder);
    std::this_thread::sleep_for(kSleep);
  }
}

ProcessEnd run_process(const std::string& program, const std::vector<std::string>& arguments,
                       const std::string& console, const LauncherWords& launcher) {
  engine::FileDescriptor out(::open(
      console.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666));
  require<IoError>(out.is_open(), "[trainer] expected a file to print to, got {} ({})",
                   std::strerror(errno), console);
  int ends[2];
  require<IoError>(::pipe2(ends, O_CLOEXEC) == 0, "[trainer] expected a pipe, got {}",
                   std::strerror(errno));
  engine::FileDescriptor errors(ends[0]), write_end(ends[1]);
  const bool is_launched = !launcher.words.empty();
  const std::string& path = is_launched ? launcher.path : program;
  std::vector<std::string> words = launcher.words;
  words.push_back(program);
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  if (is_launched) ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    become(path.c_str(), argv.data(), is_launched, out.get(), write_end.get(), parent);
  }
  require<IoError>(child > 0, "[trainer] expected a process to start, got {} ({})",
                   std::strerror(errno), path);
  if (is_launched) ::setpgid(child, child);  // whoever is first
  write_end.close();
  int error = 0;
  const bool failed = ::read(errors.get(), &error, sizeof(error)) == sizeof(error);
  const ProcessEnd end = wait_for(child, is_launched);
  if (is_launched) end_leftovers();
  require<IoError>(!failed, "[trainer] expected a program that starts, got {} ({})",
                   std::generic_category().message(error), path);
  return end;
}

}  // namespace tessera::tools
