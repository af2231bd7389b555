// Writes text to a file, a pipe or a terminal from a thread of its own, so that a reader that
// pauses and a disk that is slow or full hold up nobody who has something to say.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "engine/io/file.h"

namespace tessera::tools {

class BackgroundWriter {
 public:
  /// `fd` stays the caller's, and open while this lives. `path` names it in messages. Throws
  /// DeviceError when no thread starts.
  BackgroundWriter(int fd, std::string path, std::size_t max_queued_nbytes = std::size_t{16} << 20);
  /// Writes what is left, but gives up after a second without progress: flush() knows better.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  /// Queues `text`: one write, or in a pipe parts that are written whole. Never blocks: what would
  /// wait for other text, `max_queued_nbytes` in all, is lost with the error ENOBUFS. So is what
  /// comes after a write that failed.
  void write(std::string text);
  /// The error of the first write that failed, if one did; later text is lost.
  std::optional<std::error_code> error() const;
  /// Whether all is written, or lost.
  bool is_idle() const;
  /// Waits until all is written: as long as that takes, or until there was no progress for 5
  /// seconds while `hurries()`, which is asked again and again, was true. Null: nobody hurries.
  /// Throws IoError naming the path.
  using Hurries = std::function<bool()>;
  void flush(const Hurries& hurries = nullptr);

 private:
  void run();
  /// The system's error number, 0 if none.
  int write_out(std::string_view text);
  bool wait_for_room();
  bool is_closing() const;

  const std::size_t max_queued_nbytes_;
  const engine::FileDescriptor own_fd_;  // of a terminal
  const int fd_;
  const std::string path_;
  const engine::FileDescriptor wake_;  // ends a wait for room when this closes
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> queue_;  // the front is being written
  std::size_t queued_nbytes_ = 0;
  std::int64_t num_written_ = 0;
  bool closing_ = false;
  std::optional<std::error_code> error_;
  std::thread thread_;
};

}  // namespace tessera::tools
