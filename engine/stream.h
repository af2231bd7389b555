// Streams and events. A stream runs launched work in order; an event marks a moment of a stream.
//
//   Stream compute = Stream::inline_cpu("compute");      // runs in the calling thread
//   Stream comm = Stream::worker_cpu("comm");            // a worker thread with a FIFO
//   comm.launch({.name = "all_gather"}, [=] { ... });
//   Event gathered = comm.record("gathered");
//   compute.wait(gathered);                              // blocks; rethrows what failed on `comm`
//
// Both are cheap value handles. Every launch states its work, so that a listener can trace it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "engine/device.h"

namespace tessera::engine {

/// What a kernel or collective does, stated when it is launched.
struct Work {
  std::string_view name;        ///< kernel or collective; static storage
  double flops = 0;             ///< floating point operations
  std::int64_t bytes_read = 0;  ///< from memory, once each
  std::int64_t bytes_written = 0;
  std::string detail = {};  ///< unit or tensor at work; may be empty
};

/// One launch as it ran. Times are std::chrono::steady_clock nanoseconds.
struct LaunchRecord {
  const Work& work;
  const std::string& stream;
  std::int64_t begin_ns;
  std::int64_t end_ns;
};

/// Told of every launch, in the thread that ran it. Must be thread-safe and must not throw.
class LaunchListener {
 public:
  virtual ~LaunchListener() = default;
  virtual void on_launch(const LaunchRecord& record) noexcept = 0;
};

/// What a stream can be told at creation.
struct StreamOptions {
  LaunchListener* listener = nullptr;  ///< must outlive the stream; null: nobody listens
  std::uint64_t delay_seed = 0;        ///< not 0: sleep a random 0..1 ms before each launch (tests)
};

namespace internal {
struct EventState;
class StreamImpl;
}  // namespace internal

/// A moment of a stream. Default constructed: already reached.
class Event {
 public:
  Event() = default;
  bool reached() const;
  /// Blocks the calling thread. Rethrows the error of the stream, if it failed before this moment.
  void wait() const;

 private:
  friend class internal::StreamImpl;
  explicit Event(std::shared_ptr<internal::EventState> state) : state_(std::move(state)) {}
  std::shared_ptr<internal::EventState> state_;
};

class Stream {
 public:
  /// Runs work in the calling thread at once; errors are thrown from launch().
  static Stream inline_cpu(std::string name, StreamOptions options = {});
  /// Runs work in a thread of its own, first in first out. After the first error the rest is
  /// skipped and every later event carries that error. The last handle drains and joins.
  static Stream worker_cpu(std::string name, StreamOptions options = {});

  /// Runs `fn` after everything launched before. `fn` must own or outlive what it touches.
  void launch(Work work, std::function<void()> fn) const;
  /// The moment when everything launched so far is done.
  Event record(std::string_view name) const;
  /// Later launches run after `event`. An inline stream blocks its thread and rethrows.
  void wait(const Event& event) const;
  /// Blocks until everything is done. Rethrows the first error.
  void synchronize() const;

  const std::string& name() const;
  Device device() const { return {}; }
  /// Nanoseconds an inline stream has spent blocked in wait(), since creation.
  std::int64_t blocked_ns() const;

 private:
  explicit Stream(std::shared_ptr<internal::StreamImpl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<internal::StreamImpl> impl_;
};

}  // namespace tessera::engine
