// When work of a GPU ran. Private to engine, like stream_impl.h.
//
// [Note: times of a GPU]
// A timed event stands after each wait, at each time(), and with a listener after each launch.
// Where work begins is the event after the work before it, if that one was not reached when it was
// asked about, just before the new work was enqueued: then the GPU goes from one to the next at
// once. If it was reached, the stream ran dry, and the work gets an event of its own to begin with,
// as an idle gap is no part of it. The GPU may get there between the question and the host's first
// call that enqueues: then the gap that counts as work is what the host takes for that, some
// microseconds, nearly all of which would stand after an event of its own as well. Nothing else
// may have been enqueued between the two: whoever takes the stream's handle may do so, and what was
// launched without a time or failed has, so after these work begins with an event of its own too.
// (Events that others wait for take the GPU no time that counts.) Each launch asks once: an older
// answer would not do, as kernels are as short as the host's time between two of them.
//
// Times are read when they are past, never waited for: at a synchronisation, at each wait and
// time(), when blocked_ns() is asked, and when more than kMaxPending of them stand, so that their
// number is bounded by what the GPU has not done yet. A GPU has a clock of its own, whose
// differences are f32 milliseconds. So times are counted from a base, an event whose host time is
// known: each synchronisation sets one, to the few microseconds it takes to wake up, and without
// any the last launch that was told becomes the next base, so that differences stay short. Then
// only the drift between the two clocks adds up. Where the listener has left launches out, the next
// one that it wants sets a base, and so waits once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "engine/cuda_host_flags.h"
#include "engine/cuda_marks.h"
#include "engine/stream.h"

namespace tessera::engine::internal {

/// The times of one stream. For one thread at a time, and its GPU must be current.
class CudaTimes {
 public:
  /// `name`: the stream's, which outlives this, as `listener` does. Null: nobody listens.
  CudaTimes(cudaStream_t stream, int gpu, const std::string& name, LaunchListener* listener)
      : stream_(stream), name_(name), listener_(listener), marks_(gpu) {}

  /// Where what is enqueued next begins.
  CudaMark begin();
  /// What follows `begin` was enqueued: a launch, a wait (for `flag`, which is kept until then), or
  /// nothing, to know the time.
  void end_launch(CudaMark begin, Work work, std::uint64_t ticket);
  void end_wait(CudaMark begin, std::shared_ptr<HostFlag> flag = nullptr);
  void end_time(std::shared_ptr<StreamTime> time);
  /// Something was enqueued, or may be now, that has no end here.
  void forget() { last_ = nullptr; }

  /// Accounts for what is past.
  void settle() { settle(/*is_before_base=*/false); }
  /// Blocks until everything is done, and sets a base.
  void rebase();
  /// Of waits that were accounted for.
  std::int64_t blocked_ns() const { return blocked_ns_; }

 private:
  struct Pending {
    CudaMark begin = nullptr;  // of a time: none
    CudaMark end = nullptr;
    Work work = {};                         // no name: a wait, or a time
    std::uint64_t ticket = 0;               // of a launch
    std::shared_ptr<HostFlag> flag = {};    // that is waited for
    std::shared_ptr<StreamTime> time = {};  // to be told of `end`
  };
  struct Base {
    CudaMark mark;
    std::int64_t ns;  // of the host, when the mark was reached
  };

  static constexpr std::size_t kMaxPending = 256;

  void end(Pending pending);
  void set_base();
  void settle(bool is_before_base);
  void tell(Pending& pending);

  const cudaStream_t stream_;
  const std::string& name_;
  LaunchListener* const listener_;
  CudaMarks marks_;
  CudaMark last_;  // after which nothing was enqueued; null: not known
  std::deque<Pending> pending_;
  std::size_t settle_above_ = kMaxPending;  // so many that are pending
  std::optional<Base> base_;                // with a listener, or after a synchronisation
  std::int64_t blocked_ns_ = 0;
  CudaMark last_time_;            // that was told; null: none
  std::int64_t time_ns_ = 0;      // then
  std::int64_t last_end_ns_ = 0;  // told to the listener
};

}  // namespace tessera::engine::internal
