// Streams and events. A stream runs launched work in order; an event marks a moment of a stream.
//
//   Stream compute = Stream::inline_cpu("compute");      // runs in the calling thread
//   Stream comm = Stream::worker_cpu("comm");            // a worker thread with a FIFO
//   comm.launch({.name = "all_gather"}, [=] { ... });
//   Event gathered = comm.record("gathered");
//   compute.wait(gathered);                              // blocks; rethrows what failed on `comm`
//
// On a GPU the same lines enqueue, and compute.wait() makes the GPU wait, not the host:
//
//   Stream compute = Stream::cuda("compute", 0);
//   Stream comm = compute.sibling("comm");
//
// Both are cheap value handles. Every launch states its work, so that a listener can trace it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeindex>
#include <utility>

#include "engine/device.h"
#include "engine/isa.h"

namespace tessera::engine {

/// What a kernel or collective does, stated when it is launched.
struct Work {
  std::string_view name;        ///< kernel or collective; static storage
  double flops = 0;             ///< floating point operations
  std::int64_t bytes_read = 0;  ///< from memory, once each
  std::int64_t bytes_written = 0;
  std::int64_t bytes_sent = 0;  ///< to other ranks, by one rank
  std::int64_t bytes_up = 0;    ///< copied from memory of the host to a device
  std::int64_t bytes_down = 0;  ///< copied from a device to memory of the host
  std::string detail = {};      ///< unit or tensor at work; may be empty
};

/// What work is for: a region of a tape, and which of its passes.
struct Scope {
  std::string_view block = {};  ///< its name; empty: none
  std::string_view phase = {};  ///< "forward", "recompute" or "backward"; static storage
};

/// A launch before it runs.
struct LaunchRequest {
  const Work& work;
  const std::string& stream;
  Scope scope;
};

/// One launch as it ran. Times are std::chrono::steady_clock nanoseconds; those of a GPU are mapped
/// onto that clock.
struct LaunchRecord {
  const Work& work;
  const std::string& stream;
  std::int64_t begin_ns;
  std::int64_t end_ns;
  std::uint64_t ticket = 0;  ///< what LaunchListener::on_enqueue() returned
};

/// Told of every launch: in the thread that ran it, or for a CUDA stream some time later, in the
/// thread that launches more, synchronises or destroys it. Must be thread-safe and must not throw.
class LaunchListener {
 public:
  virtual ~LaunchListener() = default;
  /// Asked first, in the thread that launches. The number comes back with the record; without one
  /// the launch is neither timed nor told.
  virtual std::optional<std::uint64_t> on_enqueue(const LaunchRequest& /*request*/) noexcept {
    return 0;
  }
  virtual void on_launch(const LaunchRecord& record) noexcept = 0;
};

/// What a stream can be told at creation.
struct StreamOptions {
  LaunchListener* listener = nullptr;  ///< must outlive the stream; null: nobody listens
  std::uint64_t delay_seed = 0;        ///< not 0: sleep a random 0..1 ms before each launch (tests)
};

struct MetaRates;

namespace internal {
class EventState;
struct StreamCapture;
class StreamImpl;
}  // namespace internal

/// A moment of a stream. Default constructed: already reached.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<internal::EventState> state) : state_(std::move(state)) {}
  bool reached() const;
  /// Blocks the calling thread. Rethrows the error of the stream, if it failed before this moment.
  void wait() const;
  /// This event for a thread that a GPU may come to wait for, which must call nothing of CUDA: not
  /// to wait for an event of a GPU, nor to give one back. For whoever tells that thread to wait,
  /// the one that drives the stream of this event. See engine/cuda_host_events.h. Throws
  /// DeviceError.
  Event for_host() const;

  /// For implementations of streams.
  internal::EventState* state() const { return state_.get(); }

 private:
  std::shared_ptr<internal::EventState> state_;
};

/// When a stream came to a place; see Stream::time().
struct StreamTime {
  std::int64_t ns = 0;          ///< on a clock of this stream's own
  std::int64_t blocked_ns = 0;  ///< that wait() had held it up until then
  bool is_known = false;
};

class Stream {
 public:
  /// Runs work in the calling thread at once; errors are thrown from launch().
  static Stream inline_cpu(std::string name, StreamOptions options = {});
  /// Runs work in a thread of its own, first in first out. After the first error the rest is
  /// skipped and every later event carries that error. The last handle drains and joins.
  static Stream worker_cpu(std::string name, StreamOptions options = {});
  /// A queue of GPU `index`. launch() calls its function at once, which enqueues kernels. Used by
  /// one thread. Throws DeviceError if the build has no CUDA or the machine no such GPU.
  static Stream cuda(std::string name, int index, StreamOptions options = {});
  /// A stream of a device that is not there; see meta.h. Throws DeviceError for a GPU if the build
  /// has no CUDA.
  static Stream meta(std::string name, DeviceKind kind, const MetaRates& rates,
                     StreamOptions options = {});
  /// A queue of the same device that runs while this one does: a worker thread, or another CUDA
  /// stream.
  Stream sibling(std::string name, StreamOptions options = {}) const;
  /// A worker thread of the host that this device belongs to.
  Stream host_worker(std::string name, StreamOptions options = {}) const;

  /// Runs `fn` after everything launched before. `fn` must own or outlive what it touches.
  void launch(Work work, std::function<void()> fn) const;
  /// launch() with one function a kind of device: `cpu()`, compiled for the instruction set of this
  /// CPU, or `cuda(stream)` with this stream.
  /// Write `cuda` as a generic lambda, so that what it calls need not exist in a build without
  /// CUDA.
  template <class Cpu, class Cuda>
  void launch(Work work, Cpu cpu, Cuda cuda) const {
    if constexpr (kCudaBuilt) {
      if (device().is_cuda()) {
        launch(std::move(work), [&] { cuda(*this); });
        return;
      }
    }
    if (device().is_meta) return launch(std::move(work), std::function<void()>());
    launch(std::move(work), [cpu = std::move(cpu)] { with_isa(cpu); });
  }
  /// The moment when everything launched so far is done.
  Event record(std::string_view name) const;
  /// Later launches run after `event`. An inline stream blocks its thread and rethrows. A GPU waits
  /// for an event of the CPU as well; if that failed, the next call throws what it failed with.
  void wait(const Event& event) const;
  /// Blocks until everything is done. Rethrows the first error.
  void synchronize() const;
  /// synchronize() for whoever cleans up: errors were told to those who wait for the work.
  void synchronize_quietly() const noexcept;

  const std::string& name() const;
  Device device() const;
  /// What is launched here until pop_scope() is for `scope`, say listeners and, on a GPU, NVTX
  /// ranges. Scopes nest; the innermost counts. `scope` names what outlives it. By the thread that
  /// launches.
  void push_scope(Scope scope) const;
  void pop_scope() const;

  /// Nanoseconds this stream has been held up in wait(), since creation: the thread of an inline
  /// stream; on a GPU the waits that are over by now.
  std::int64_t blocked_ns() const;
  /// When everything launched so far is done, for differences to other times of this stream. Known
  /// at once of an inline stream; on a GPU when blocked_ns() or synchronize() is called after that
  /// moment, which nobody waits for. Never known of a worker thread, nor inside a capture.
  std::shared_ptr<const StreamTime> time() const;
  /// What is launched now is kept for a graph; see cuda_graph.h.
  bool is_capturing() const;
  /// The cudaStream_t, or null.
  void* native() const;
  /// A T(stream) that lives as long as the stream does: library handles and what they cache. Made
  /// at the first call. Not thread-safe; T must not keep the stream it is given.
  template <class T>
  T& state() const {
    std::shared_ptr<void>& slot = state_slot(typeid(T));
    if (!slot) slot = std::make_shared<T>(*this);
    return *static_cast<T*>(slot.get());
  }

  friend bool operator==(const Stream&, const Stream&) = default;
  friend std::int64_t meta_now_ns(const Stream& stream);
  friend class CudaGraph;

 private:
  explicit Stream(std::shared_ptr<internal::StreamImpl> impl) : impl_(std::move(impl)) {}
  void set_capture(const std::shared_ptr<internal::StreamCapture>& capture) const;
  std::shared_ptr<void>& state_slot(std::type_index type) const;
  std::shared_ptr<internal::StreamImpl> impl_;
};

}  // namespace tessera::engine
