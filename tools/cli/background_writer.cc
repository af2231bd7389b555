#include "tools/cli/background_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {

// [Note: writing without being stuck]
// A thread inside write() cannot be called back, so it writes only what fits: it waits in poll(),
// which closing ends, and a pipe that has room takes PIPE_BUF bytes at once. Files always have
// room. A terminal has room when it takes a single byte, so it is opened once more, not blocking;
// the descriptor itself may be shared with a shell and stays as it is.

namespace {

engine::FileDescriptor open_terminal(int fd) {
  if (::isatty(fd) == 0) return engine::FileDescriptor();
  return engine::FileDescriptor(::open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                                       O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

}  // namespace

BackgroundWriter::BackgroundWriter(int fd, std::string path, std::size_t max_queued_nbytes)
    : max_queued_nbytes_(max_queued_nbytes),
      own_fd_(open_terminal(fd)),
      fd_(own_fd_.is_open() ? own_fd_.get() : fd),
      path_(std::move(path)),
      wake_(::eventfd(0, EFD_CLOEXEC)) {
  engine::require<engine::IoError>(wake_.is_open(), "[writer] expected an eventfd, got {} ({})",
                                   std::generic_category().message(errno), path_);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    engine::fail<engine::DeviceError>("[writer] expected to start a thread, got {} ({})",
                                      error.what(), path_);
  }
}

BackgroundWriter::~BackgroundWriter() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  (void)::eventfd_write(wake_.get(), 1);
  thread_.join();
}

void BackgroundWriter::write(std::string text) {
  const std::lock_guard lock(mutex_);
  if (error_ || text.empty()) return;
  if (!queue_.empty() && queued_nbytes_ + text.size() > max_queued_nbytes_) {
    error_ = std::error_code(ENOBUFS, std::generic_category());
    return;
  }
  queue_.push_back(std::move(text));
  queued_nbytes_ += queue_.back().size();
  changed_.notify_all();
}

std::optional<std::error_code> BackgroundWriter::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool BackgroundWriter::is_idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty();
}

void BackgroundWriter::flush(const Hurries& hurries) {
  using std::chrono::milliseconds;
  constexpr milliseconds kPatience(5000), kLongest(10);
  std::unique_lock lock(mutex_);
  std::int64_t seen = num_written_;
  milliseconds waited(0);  // counts sleeps: while the process is stopped nothing could be written
  // Short sleeps: a condition with a deadline is not known to GCC 12's thread sanitizer.
  for (milliseconds sleep(1); !queue_.empty() && waited < kPatience;
       sleep = std::min(sleep + milliseconds(1), kLongest)) {
    lock.unlock();
    std::this_thread::sleep_for(sleep);
    const bool is_hurried = hurries != nullptr && hurries();
    lock.lock();
    const bool has_progress = std::exchange(seen, num_written_) != num_written_;
    waited = is_hurried && !has_progress ? waited + sleep : milliseconds(0);
  }
  if (!queue_.empty() && !error_) error_ = std::error_code(ETIMEDOUT, std::generic_category());
  engine::require<engine::IoError>(!error_, "[writer] expected to write all output, got {} ({})",
                                   error_ ? error_->message() : "", path_);
}

void BackgroundWriter::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::string& text = queue_.front();  // push_back() leaves it where it is
    lock.unlock();
    const int error = write_out(text);
    lock.lock();
    if (error != 0) {
      if (!error_) error_ = std::error_code(error, std::generic_category());
      queue_.clear();
      queued_nbytes_ = 0;
    } else {
      queued_nbytes_ -= text.size();
      queue_.pop_front();
      ++num_written_;
    }
    changed_.notify_all();
  }
}

bool BackgroundWriter::is_closing() const {
  const std::lock_guard lock(mutex_);
  return closing_;
}

int BackgroundWriter::write_out(std::string_view text) {
  // Terminals have been seen to promise room for a line break and then to refuse it.
  constexpr int kMaxRefused = 1000;
  int num_refused = 0;
  while (!text.empty()) {
    if (!wait_for_room()) return ETIMEDOUT;
    const ssize_t written = ::write(fd_, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
      num_refused = 0;
    } else if (errno == EAGAIN) {  // less room than poll() promised
      if (++num_refused > kMaxRefused && is_closing()) return ETIMEDOUT;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

// False when this closes and there is no room for a second. Errors are found by write().
bool BackgroundWriter::wait_for_room() {
  constexpr int kPatience_ms = 1000;
  for (bool closing = false;;) {
    std::array<pollfd, 2> files{{{.fd = fd_, .events = POLLOUT, .revents = 0},
                                 {.fd = wake_.get(), .events = POLLIN, .revents = 0}}};
    const int count = ::poll(files.data(), closing ? 1 : 2, closing ? kPatience_ms : -1);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 || files[0].revents != 0) return true;
    if (closing) return false;
    closing = files[1].revents != 0;
  }
}

}  // namespace tessera::tools
