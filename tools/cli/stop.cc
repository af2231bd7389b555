#include "tools/cli/stop.h"

#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>

namespace tessera::tools {
namespace {

struct Stop {
  int signal;
  std::string_view name;
  std::string_view message;  // begins with kEraseLine
};
constexpr std::string_view kEraseLine = "\r\x1b[K";  // for terminals alone
constexpr std::array<Stop, 5> kStops{{
    {SIGINT, "SIGINT", "\r\x1b[KSIGINT: ending soon; another one ends at once\n"},
    {SIGTERM, "SIGTERM", "\r\x1b[KSIGTERM: ending soon; another one ends at once\n"},
    {SIGHUP, "SIGHUP", "\r\x1b[KSIGHUP: ending soon; another one ends at once\n"},
    {SIGUSR1, "SIGUSR1", "\r\x1b[KSIGUSR1: ending soon; another one ends at once\n"},
    {SIGPIPE, "SIGPIPE", ""},
}};

// Signals are the process's, so these are, too.
std::atomic<int> requested = 0;
std::atomic<bool> stderr_is_terminal = false;   // where a status line may stand
std::atomic<std::int64_t> first_signal_ns = 0;  // 0: none yet
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

constexpr std::int64_t kSameRequest_ns = std::chrono::nanoseconds(kSameRequest).count();

// Calls only what a signal handler may.
void on_signal(int signal) {
  const int error = errno;
  timespec time{};
  (void)::clock_gettime(CLOCK_MONOTONIC, &time);
  const std::int64_t now = time.tv_sec * std::int64_t{1'000'000'000} + time.tv_nsec;
  std::int64_t first = 0;
  if (!first_signal_ns.compare_exchange_strong(first, now)) {
    if (now - first > kSameRequest_ns) {
      ::signal(signal, SIG_DFL);
      ::raise(signal);  // ends the process when this handler returns
    }
    errno = error;
    return;
  }
  request_stop(signal);
  for (const Stop& stop : kStops) {
    pollfd file{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
    // Whoever does not read stderr is not waited for.
    if (stop.signal != signal || ::poll(&file, 1, 0) != 1) continue;
    const std::string_view message = stop.message.substr(
        stderr_is_terminal ? 0 : std::min(kEraseLine.size(), stop.message.size()));
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, message.data(), message.size());
  }
  errno = error;
}

}  // namespace

StopSignals::StopSignals() {
  requested = 0;
  first_signal_ns = 0;
  stderr_is_terminal = ::isatty(STDERR_FILENO) == 1;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    Saved saved{.signal = signal, .action = {}};
    if (::sigaction(signal, nullptr, &saved.action) == 0 && saved.action.sa_handler == SIG_IGN) {
      continue;
    }
    saved_.push_back(saved);
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    (void)::sigaction(signal, &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (const Saved& saved : saved_) ::sigaction(saved.signal, &saved.action, nullptr);
}

int stop_requested() { return requested; }

void request_stop(int signal) {
  int none = 0;
  requested.compare_exchange_strong(none, signal);
}

std::string_view signal_name(int signal) {
  if (signal == kTimeIsUp) return "train.max_minutes";
  for (const Stop& stop : kStops) {
    if (stop.signal == signal) return stop.name;
  }
  return "a signal";
}

}  // namespace tessera::tools
