// Signals that ask a program to end: a training ends after the step at work and keeps what it has.
#pragma once

#include <signal.h>

#include <chrono>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// One key press may arrive twice, a moment apart: a terminal signals the whole group, and whoever
/// started the program (bazel run, timeout, //tools:compare, which looks every 10 ms) passes it on.
/// No person presses twice that fast.
inline constexpr std::chrono::milliseconds kSameRequest{100};

/// While it lives, SIGINT, SIGTERM, SIGHUP and SIGUSR1, which clusters send before a job's time is
/// up, ask to stop, unless they are ignored (nohup). The first says so on stderr, what comes within
/// kSameRequest of it is the same request, and a signal after that ends the process at once, as
/// ever. One at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  struct Saved {
    int signal;
    struct sigaction action;
  };
  std::vector<Saved> saved_;
};

/// Why to stop: the number of a signal. 0: go on. Stays as it is once it is not 0.
int stop_requested();
/// Asks to stop as `signal` would, unless asked already. Does not count as a first signal.
void request_stop(int signal);
/// What ends a training that has taken as long as it may, in the place of a signal's number.
inline constexpr int kTimeIsUp = -1;
/// "SIGTERM"; "train.max_minutes" of kTimeIsUp; "a signal" for those that do not ask to stop.
std::string_view signal_name(int signal);

}  // namespace tessera::tools
