// System calls that fail, stop or kill the process where a test says: see faults.h. Linked into a
// test, or preloaded into a program.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <string>
#include <string_view>

namespace {

template <class F>
F* real(const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

std::string path_of(int fd) {
  char link[64], path[4096];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t n = ::readlink(link, path, sizeof(path));
  return n < 0 ? "" : std::string(path, static_cast<std::size_t>(n));
}

/// The part of `text` up to the next `mark`, which is removed from it.
std::string_view take(std::string_view& text, char mark = '|') {
  const std::size_t end = text.find(mark);
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(end == text.npos ? text.size() : end + 1);
  return part;
}

bool lists(std::string_view calls, std::string_view call) {
  while (!calls.empty()) {
    if (take(calls, ',') == call) return true;
  }
  return false;
}

std::atomic<int> num_calls{0};
std::atomic<ssize_t> num_bytes{0};

int really_open(const char* path, int flags) {
  return real<int(const char*, int, ...)>("open")(path, flags, 0600);
}

/// Adds "CALL WHAT" to the file at `list`.
void write_down(std::string_view call, std::string_view what, const std::string& list) {
  std::string line(call);
  line += ' ';
  line += what;
  line += '\n';
  const int fd = really_open(list.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC);
  const ssize_t n = real<ssize_t(int, const void*, size_t)>("write")(fd, line.data(), line.size());
  if (n != static_cast<ssize_t>(line.size())) ::abort();
  real<int(int)>("close")(fd);
}

struct Wanted {
  std::string_view calls, part;
  int at = 0;
  std::string action;

  bool is(std::string_view call, std::string_view path) const {
    return lists(calls, call) && path.find(part) != path.npos;
  }
};

Wanted wanted() {
  const char* const fault = ::getenv("TEST_FAULT");
  std::string_view text = fault == nullptr ? "" : fault;
  Wanted w{.calls = take(text), .part = take(text), .at = 0, .action = {}};
  w.at = std::atoi(std::string(take(text)).c_str());
  w.action = text;
  return w;
}

/// Whether this call fails; errno says how. `to`: the other path, if there are two.
bool fails(std::string_view call, std::string_view path, const char* to = nullptr) {
  if (::getenv("TEST_FAULT") == nullptr) return false;
  const int before = errno;
  const Wanted w = wanted();
  const int at = w.at;
  const std::string& action = w.action;
  const bool counts = w.is(call, path);
  if (counts && at == 0) write_down(call, path.substr(path.rfind('/') + 1), action);
  if (counts && at < 0) {
    write_down(call, std::string(path) + (to == nullptr ? "" : std::string(" ") + to), action);
  }
  if (!counts || ++num_calls != at) {
    errno = before;
    return false;
  }
  if (action == "kill") ::kill(::getpid(), SIGKILL);
  if (action == "exit") ::_exit(0);
  if (action.starts_with('/')) {
    ::close(really_open(action.c_str(), O_WRONLY | O_CREAT));
    while (::access(action.c_str(), F_OK) == 0) ::usleep(1000);
    errno = before;
    return false;
  }
  errno = std::atoi(action.c_str());
  return true;
}

/// Whether `call` of an open file is to fail. Without a fault it needs no memory.
bool fails(std::string_view call, int fd) {
  return ::getenv("TEST_FAULT") != nullptr && fails(call, path_of(fd));
}

}  // namespace

extern "C" {

void tessera_reset_faults() {
  num_calls = 0;
  num_bytes = 0;
}

int rename(const char* from, const char* to) noexcept {
  return fails("rename", from, to) ? -1 : real<int(const char*, const char*)>("rename")(from, to);
}

int unlink(const char* path) noexcept {
  return fails("unlink", path) ? -1 : real<int(const char*)>("unlink")(path);
}

int rmdir(const char* path) noexcept {
  return fails("rmdir", path) ? -1 : real<int(const char*)>("rmdir")(path);
}

int mkdir(const char* path, mode_t mode) noexcept {
  return fails("mkdir", path) ? -1 : real<int(const char*, mode_t)>("mkdir")(path, mode);
}

DIR* opendir(const char* path) {
  return fails("opendir", path) ? nullptr : real<DIR*(const char*)>("opendir")(path);
}

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
    if (fails("create", path)) return -1;
  } else if (fails("open", path)) {
    return -1;
  }
  return real<int(const char*, int, ...)>("open")(path, flags, mode);
}

int fsync(int fd) {
  if (fails("fsync", fd)) return -1;
  // Tests that end the process, not the machine, need not wait for the disk.
  return ::getenv("TEST_NO_FLUSH") != nullptr ? 0 : real<int(int)>("fsync")(fd);
}

int flock(int fd, int operation) noexcept {
  return fails("flock", fd) ? -1 : real<int(int, int)>("flock")(fd, operation);
}

ssize_t write(int fd, const void* bytes, size_t n) {
  auto* const write_it = real<ssize_t(int, const void*, size_t)>("write");
  if (::getenv("TEST_FAULT") == nullptr) return write_it(fd, bytes, n);
  const std::string path = path_of(fd);
  const Wanted w = wanted();
  if (w.is("bytes", path)) {
    // The disk has room for `at` bytes.
    const ssize_t room = w.at - num_bytes.fetch_add(static_cast<ssize_t>(n));
    if (room >= static_cast<ssize_t>(n)) return write_it(fd, bytes, n);
    if (room > 0) return write_it(fd, bytes, static_cast<size_t>(room));
    errno = std::atoi(w.action.c_str());
    return -1;
  }
  if (!fails("write", path)) return write_it(fd, bytes, n);
  return w.action == "short" ? write_it(fd, bytes, n > 0 ? 1 : 0) : -1;
}

ssize_t send(int fd, const void* bytes, size_t n, int flags) {
  return fails("send", fd)
             ? -1
             : real<ssize_t(int, const void*, size_t, int)>("send")(fd, bytes, n, flags);
}

// Closes all the same, as Linux does.
int close(int fd) {
  const bool failed = fails("close", fd);
  const int error = errno;
  const int result = real<int(int)>("close")(fd);
  if (failed) errno = error;
  return failed ? -1 : result;
}
}
