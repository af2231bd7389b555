#include "tools/background_writer.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {

// [Note: writing without being stuck]
// A thread inside write() cannot be called back, so it writes only what fits: it waits in poll(),
// which closing ends, and a pipe that has room takes PIPE_BUF bytes at once. Files always have
// room. The descriptor itself stays blocking: it may be shared with a shell.

BackgroundWriter::BackgroundWriter(int fd, std::string path)
    : fd_(fd), path_(std::move(path)), wake_(::eventfd(0, EFD_CLOEXEC)) {
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
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return error_ || queued_nbytes_ < kMaxQueuedNbytes; });
  if (error_ || text.empty()) return;
  queue_.push_back(std::move(text));
  queued_nbytes_ += queue_.back().size();
  changed_.notify_all();
}

std::optional<std::error_code> BackgroundWriter::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void BackgroundWriter::flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return error_ || queue_.empty(); });
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
      error_ = std::error_code(error, std::generic_category());
      queue_.clear();
      queued_nbytes_ = 0;
    } else {
      queued_nbytes_ -= text.size();
      queue_.pop_front();
    }
    changed_.notify_all();
  }
}

int BackgroundWriter::write_out(std::string_view text) {
  while (!text.empty()) {
    if (!wait_for_room()) return ETIMEDOUT;
    const ssize_t written = ::write(fd_, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR && errno != EAGAIN) {
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
