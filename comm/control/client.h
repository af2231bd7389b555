// One process's end of its connection to process 0: what Control offers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/control/connection.h"
#include "comm/control/control.h"
#include "comm/control/wake.h"
#include "comm/world/deadline_clock.h"

namespace tessera::comm::control {

/// Thread-safe. Its own thread alone touches the connection; others leave in here what it is to
/// say.
class Client {
 public:
  /// Of a process with `num_ranks`. `connection`: on which process 0 has said Go, with `names`.
  Client(int process, int num_ranks, std::chrono::milliseconds deadline, Connection connection,
         std::vector<std::string> names);

  int process() const { return process_; }
  int num_processes() const { return static_cast<int>(names_.size()); }
  const std::string& name(int process) const { return names_[index(process)]; }

  // As in Control.

  std::vector<std::string> all_gather(std::string_view label, std::string own);
  void fail(std::string message) noexcept;
  std::optional<std::string> failure_within(std::chrono::milliseconds time) const;
  bool has_failed() const noexcept;
  void listen(Control::Events events);
  void say_call(std::string_view text, int rank) noexcept;
  void say_left(int rank) noexcept;
  bool has_left(int process, int rank) const;
  std::string last_call(int process, int rank) const;
  /// Tells the other processes that this one has left. At the end, once.
  void leave();
  /// Counts one pause more (1), or one less (-1).
  void change_pauses(int change) noexcept;

 private:
  void run();
  bool take_orders();  // false: nothing more is to be said
  void take_words();
  void hear(Frame frame);
  void watch();
  void tell_events();
  void lose_server(const std::string& how);
  void fail_locked(std::string message);
  // Whether the job fails before `limit`. Nobody says so any more once process 0 has left.
  bool wait_for_failure(net::Time limit) const noexcept;
  // Wakes who waits for what has changed, and the thread.
  void changed() noexcept;
  std::size_t index(int process) const;
  const RankCall* find_call(int process, int rank) const;  // null: it has said nothing

  const int process_;
  const std::chrono::milliseconds silence_limit_;
  const std::vector<std::string> names_;
  Wake wake_;
  std::atomic<std::uint32_t> num_changes_ = 0;
  std::mutex gather_mutex_;  // one all_gather at a time
  std::uint64_t sequence_ = 0;

  // Of the thread.
  std::optional<Connection> connection_;
  DeadlineClock clock_;
  DeadlineClock::time_point heard_ = clock_.now();
  net::Time next_beat_ = {}, leave_limit_ = {};
  bool has_said_paused_ = false, has_said_left_ = false;
  bool is_failure_told_ = false, is_pause_told_ = false;  // to events_

  mutable std::mutex mutex_;  // guards the rest
  std::vector<Bytes> to_send_;
  std::optional<std::string> failure_;
  std::optional<std::vector<std::string>> gathered_;
  std::optional<Control::Events> events_;
  std::vector<std::vector<RankCall>> calls_;  // by process
  std::vector<bool> has_left_;
  std::vector<RankCall> own_calls_;  // their memory is there from the start
  bool has_rank_left_ = false;       // since the last beat
  int num_pauses_ = 0;
  bool is_paused_ = false;  // somebody is
  bool is_leaving_ = false, is_broken_ = false;

  std::thread thread_;
};

}  // namespace tessera::comm::control
