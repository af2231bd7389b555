// System calls that fail, stop or kill the process where a test says: see faults.h. Linked into a
// test, or preloaded into a program.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
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

/// Adds "CALL NAME" to the file at `list`, where NAME is the end of the path.
void write_down(std::string_view call, std::string_view path, const std::string& list) {
  std::string line(call);
  line += ' ';
  line += path.substr(path.rfind('/') + 1);
  line += '\n';
  const int fd = ::open(list.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const ssize_t n = real<ssize_t(int, const void*, size_t)>("write")(fd, line.data(), line.size());
  if (n != static_cast<ssize_t>(line.size())) ::abort();
  real<int(int)>("close")(fd);
}

/// Whether this call fails; errno says how.
bool fails(std::string_view call, std::string_view path) {
  const char* fault = ::getenv("TESSERA_FAULT");
  if (fault == nullptr) return false;
  const int before = errno;
  std::string_view text = fault;
  const std::string_view calls = take(text);
  const std::string_view part = take(text);
  const int at = std::atoi(std::string(take(text)).c_str());
  const std::string action(text);
  const bool counts = lists(calls, call) && path.find(part) != path.npos;
  if (counts && at == 0) write_down(call, path, action);
  if (!counts || ++num_calls != at) {
    errno = before;
    return false;
  }
  if (action == "kill") ::kill(::getpid(), SIGKILL);
  if (action.starts_with('/')) {
    ::close(::open(action.c_str(), O_WRONLY | O_CREAT, 0600));
    while (::access(action.c_str(), F_OK) == 0) ::usleep(1000);
    errno = before;
    return false;
  }
  errno = std::atoi(action.c_str());
  return true;
}

}  // namespace

extern "C" {

void tessera_reset_faults() { num_calls = 0; }

int rename(const char* from, const char* to) noexcept {
  return fails("rename", from) ? -1 : real<int(const char*, const char*)>("rename")(from, to);
}

int unlink(const char* path) noexcept {
  return fails("unlink", path) ? -1 : real<int(const char*)>("unlink")(path);
}

int rmdir(const char* path) noexcept {
  return fails("rmdir", path) ? -1 : real<int(const char*)>("rmdir")(path);
}

int fsync(int fd) { return fails("fsync", path_of(fd)) ? -1 : real<int(int)>("fsync")(fd); }

int flock(int fd, int operation) noexcept {
  return fails("flock", path_of(fd)) ? -1 : real<int(int, int)>("flock")(fd, operation);
}

ssize_t write(int fd, const void* bytes, size_t n) {
  return fails("write", path_of(fd))
             ? -1
             : real<ssize_t(int, const void*, size_t)>("write")(fd, bytes, n);
}

ssize_t send(int fd, const void* bytes, size_t n, int flags) {
  return fails("send", path_of(fd))
             ? -1
             : real<ssize_t(int, const void*, size_t, int)>("send")(fd, bytes, n, flags);
}

// Closes all the same, as Linux does.
int close(int fd) {
  const bool failed = fails("close", path_of(fd));
  const int error = errno;
  const int result = real<int(int)>("close")(fd);
  if (failed) errno = error;
  return failed ? -1 : result;
}
}
