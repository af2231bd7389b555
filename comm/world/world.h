// What all groups of one world share, whatever moves their tensors.
//
// [Note: one failure] A world fails once: with the first mismatch, deadline, departure or abort.
// All who wait in one of its groups end with that error, and so do all later calls. Ranks in
// messages are ranks of the world, whatever the group.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/world/deadline_clock.h"

namespace tessera::comm {

/// Of one process: its deadline, and its one failure. Thread-safe.
class World {
 public:
  /// `on_failure`, `flight`: as in ThreadsOptions. `patience`: see wait_for_word(), at most the
  /// deadline. Throws InvalidArgument unless deadline > 0.
  explicit World(std::chrono::milliseconds deadline,
                 std::function<void(const std::string& message)> on_failure = {},
                 std::shared_ptr<FlightRecorder> flight = {},
                 std::chrono::milliseconds patience = {});

  /// Null: nothing is recorded.
  FlightRecorder* flight() const { return flight_.get(); }
  /// Fails the world unless it has failed already: because a rank says so, or with an error.
  void abort(std::string message);
  void fail(std::string message);
  /// See ProcessGroup::abort().
  void abort_by(int world_rank, std::string_view reason) noexcept;
  /// abort() with what `message()` returns; with a few words where there is no memory for it.
  template <class F>
  void abort_with(F message) noexcept {
    abort(text_of(message));
  }
  std::chrono::milliseconds deadline() const { return deadline_; }
  /// Time as it counts against the deadline: see [Note: time that counts].
  DeadlineClock& clock() { return *clock_; }
  /// When something that begins now must be done.
  DeadlineClock::time_point time_limit() { return clock_->now() + deadline_; }
  /// See ProcessGroup::pause_deadline().
  std::shared_ptr<const void> pause_deadline() { return DeadlineClock::pause(clock_); }
  /// Returns once `word` is not `value` (true), or after the deadline (false).
  bool wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value);
  bool has_failed() { return failed_.load(std::memory_order_acquire); }
  /// Throws CommError if the world has failed.
  void check();
  /// Something fails here, and other processes may be about to say why: returns once the world has
  /// failed, or after its patience. Calls `look` again and again, which may find out.
  void wait_for_word(const std::function<void()>& look = {});
  /// Whether `message` is what abort() made every rank throw.
  bool is_echo(std::string_view message);

  /// A group whose ranks meet in this process. Its state is guarded by lock(), which all groups
  /// share, and which is held while the world calls it.
  class Group {
   public:
    virtual ~Group() = default;
    /// The world has failed: whoever waits must end.
    virtual void world_failed() = 0;
    /// What rank `world_rank` of the world waits in here, for messages; empty: in nothing.
    virtual std::string wait_of(int world_rank) const = 0;
  };
  /// Never held while working or sleeping.
  [[nodiscard]] std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

  // Under lock().

  void add(Group* group) { groups_.push_back(group); }
  void remove(Group* group) { std::erase(groups_, group); }
  void fail_locked(std::string message, bool aborted = false);
  /// What it failed with.
  const std::optional<std::string>& failure() const { return failure_; }
  /// wait_of() of the first other group where it waits.
  std::string wait_elsewhere(const Group* here, int world_rank) const;

  /// What `message()` returns, or a few words where there is no memory for it.
  template <class F>
  static std::string text_of(F message) noexcept {
    try {
      return message();
    } catch (const std::bad_alloc&) {
      return "no memory left";  // short enough to need none
    }
  }

 private:
  const std::chrono::milliseconds deadline_;
  const std::function<void(const std::string& message)> on_failure_;
  const std::shared_ptr<FlightRecorder> flight_;
  const std::chrono::milliseconds patience_;
  const std::shared_ptr<DeadlineClock> clock_ = std::make_shared<DeadlineClock>();
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;  // guards the rest, and all groups
  std::optional<std::string> failure_;
  bool aborted_ = false;  // failure_ came from abort()
  std::vector<Group*> groups_;
};

}  // namespace tessera::comm
