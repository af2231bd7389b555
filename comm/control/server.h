// Process 0's part for all processes: puts in an order what they say, and watches over them. See
// [Note: one failure of a job].
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "comm/control/door.h"
#include "comm/control/gathering.h"
#include "comm/control/members.h"
#include "comm/control/reminder.h"
#include "comm/control/wake.h"
#include "comm/world/deadline_clock.h"

namespace tessera::comm::control {

struct ServerOptions {
  int num_processes = 1;
  std::chrono::milliseconds deadline{};
  std::string place;                                        ///< for messages
  std::function<void(const std::string& note)> on_waiting;  ///< as ControlOptions have it
  std::string failure = {};  ///< why the job has failed before anyone came; empty: it has not
};

class Server {
 public:
  Server(ServerOptions options, Door door);
  /// Says to who is still connected what they have not been told. Where the job has not failed, for
  /// as long as they take it; where it has, for at most a second, or if that was before all came,
  /// for two seconds to those who come, too.
  ~Server();

 private:
  void run();
  void wait();
  bool is_done();
  void let_in();
  void hear(int process);
  void handle(int process, Frame frame);
  void handle(int process, Gather gather);
  void lose(int process, const std::string& how);
  void check_left();
  void check_join();
  void check_silence();
  void check_gathering();
  void beat();
  void change_pauses();
  void fail(std::string message);

  const ServerOptions options_;
  const int num_processes_ = options_.num_processes;
  const std::chrono::milliseconds deadline_ = options_.deadline;
  Door door_;
  Members members_;
  bool has_begun_ = false;  // all are, or were, connected
  Gathering gathering_;
  DeadlineClock::time_point gather_limit_ = {};
  std::optional<std::string> failure_;
  net::Time failed_at_ = {}, next_beat_ = {};
  bool is_own_told_ = false;
  DeadlineClock watch_;  // of who is silent
  const std::shared_ptr<DeadlineClock> clock_ = std::make_shared<DeadlineClock>();  // of deadlines
  std::shared_ptr<const void> pause_;
  const DeadlineClock::time_point join_limit_;
  Reminder reminder_;  // of who is missing
  Wake wake_;
  std::atomic<bool> is_stopping_ = false;
  net::Time stopped_at_ = {}, sent_at_ = {};
  std::thread thread_;
};

}  // namespace tessera::comm::control
