#include "tools/stop.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

namespace tessera::tools {
namespace {

struct Stop {
  int signal;
  std::string_view name;
  std::string_view message;
};
constexpr std::array<Stop, 4> kStops{{
    {SIGINT, "SIGINT", "SIGINT: ending after this step; once more ends at once\n"},
    {SIGTERM, "SIGTERM", "SIGTERM: ending after this step; once more ends at once\n"},
    {SIGHUP, "SIGHUP", "SIGHUP: ending after this step; once more ends at once\n"},
    {SIGPIPE, "SIGPIPE", ""},
}};

// Signals are the process's, so this is, too.
std::atomic<int> requested = 0;
static_assert(std::atomic<int>::is_always_lock_free);

void on_signal(int signal) {
  const int error = errno;
  int none = 0;
  if (!requested.compare_exchange_strong(none, signal)) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // ends the process when this handler returns
    return;
  }
  for (const Stop& stop : kStops) {
    pollfd file{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
    // Whoever does not read stderr is not waited for.
    if (stop.signal != signal || ::poll(&file, 1, 0) != 1) continue;
    [[maybe_unused]] const auto written =
        ::write(STDERR_FILENO, stop.message.data(), stop.message.size());
  }
  errno = error;
}

}  // namespace

StopSignals::StopSignals() {
  requested = 0;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    Saved saved{.signal = signal, .action = {}};
    ::sigaction(signal, &action, &saved.action);
    if (saved.action.sa_handler == SIG_IGN) {
      ::sigaction(signal, &saved.action, nullptr);
    } else {
      saved_.push_back(saved);
    }
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
  for (const Stop& stop : kStops) {
    if (stop.signal == signal) return stop.name;
  }
  return "a signal";
}

}  // namespace tessera::tools
