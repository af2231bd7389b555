#include "tools/cli/error_output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>

#include "engine/io/file.h"

namespace tessera::tools {
namespace {

// stderr once more, not blocking: poll() may promise a terminal's room that is less than a line, or
// a pipe's that another writer takes first. Its own descriptor may be shared and stays as it is. A
// file would begin again, and always has room.
engine::FileDescriptor open_again() {
  struct stat status {};
  const bool may_block = ::isatty(STDERR_FILENO) == 1 ||
                         (::fstat(STDERR_FILENO, &status) == 0 && S_ISFIFO(status.st_mode));
  if (!may_block) return engine::FileDescriptor();
  return engine::FileDescriptor(
      ::open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

// False when nobody reads, or it cannot be written.
bool write_out(int fd, std::string_view text, std::chrono::milliseconds patience) {
  using std::chrono::steady_clock;
  auto last = steady_clock::now();  // something was written
  while (!text.empty()) {
    int left_ms = -1;
    if (patience >= std::chrono::milliseconds(0)) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(last + patience - steady_clock::now());
      left_ms = static_cast<int>(std::max<std::chrono::milliseconds::rep>(left.count(), 0));
    }
    pollfd file{.fd = fd, .events = POLLOUT, .revents = 0};
    const int count = ::poll(&file, 1, left_ms);
    if (count == 0) return false;
    if (count < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
      if (written > 0) last = steady_clock::now();
    } else if (errno == EAGAIN) {  // less room than poll() promised
      if (left_ms == 0) return false;
      (void)::poll(nullptr, 0, 1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

void write_to_stderr(std::initializer_list<std::string_view> parts,
                     std::chrono::milliseconds patience) noexcept {
  const engine::FileDescriptor own = open_again();
  const int fd = own.is_open() ? own.get() : STDERR_FILENO;
  // At once, as far as a pipe takes it at once: others write there too.
  std::array<char, PIPE_BUF> text;
  std::size_t size = 0;
  for (std::string_view part : parts) {
    while (!part.empty()) {
      const std::size_t n = part.copy(text.data() + size, text.size() - size);
      part.remove_prefix(n);
      size += n;
      if (size < text.size()) continue;
      if (!write_out(fd, {text.data(), size}, patience)) return;
      size = 0;
    }
  }
  (void)write_out(fd, {text.data(), size}, patience);
}

}  // namespace tessera::tools
