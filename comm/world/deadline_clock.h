// The time that counts against the deadlines of a world.
//
// [Note: time that counts] A deadline finds ranks that will never come. Time in which no rank could
// have come says nothing about them: the whole process was stopped (SIGSTOP, a debugger, a machine
// that slept), or a rank said that it works on something nobody can bound, such as a file on a slow
// disk. So whoever waits looks at this clock at least every kTick, and of a longer gap between two
// looks only kMaxStep counts. While nobody waits the clock may stand still: nobody needs it.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>

namespace tessera::comm {

class DeadlineClock {
 public:
  using rep = std::chrono::nanoseconds::rep;
  using period = std::chrono::nanoseconds::period;
  using duration = std::chrono::nanoseconds;
  using time_point = std::chrono::time_point<DeadlineClock>;
  static constexpr bool is_steady = true;

  /// How often a waiting thread looks, at least.
  static constexpr std::chrono::milliseconds kTick{100};

  time_point now() {
    const std::lock_guard lock(mutex_);
    advance();
    return now_;
  }

  /// Stands still until the result and all others like it are gone, which may be later than the
  /// clock. Thread-safe.
  static std::shared_ptr<const void> pause(std::shared_ptr<DeadlineClock> clock) {
    clock->change_pauses(1);
    DeadlineClock* const paused = clock.get();
    return {paused, [clock = std::move(clock)](DeadlineClock* c) { c->change_pauses(-1); }};
  }

 private:
  static constexpr duration kMaxStep = 2 * kTick;

  void change_pauses(int change) {
    const std::lock_guard lock(mutex_);
    advance();
    num_pauses_ += change;
  }

  void advance() {
    const auto looked = std::chrono::steady_clock::now();
    if (num_pauses_ == 0) now_ += std::min<duration>(looked - looked_, kMaxStep);
    looked_ = looked;
  }

  std::mutex mutex_;
  time_point now_{};
  std::chrono::steady_clock::time_point looked_ = std::chrono::steady_clock::now();
  int num_pauses_ = 0;
};

}  // namespace tessera::comm
