// Signals that ask a program to end: which one counts, what their handler leaves alone, and what is
// given back.
#include "tools/cli/stop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <initializer_list>
#include <string>
#include <thread>

#include "engine/io/file.h"

namespace tessera::tools {
namespace {

/// stderr goes to `fd` while it lives.
class StderrTo {
 public:
  explicit StderrTo(int fd) : saved_(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) {
    ::dup2(fd, STDERR_FILENO);
  }
  ~StderrTo() { ::dup2(saved_.get(), STDERR_FILENO); }
  StderrTo(const StderrTo&) = delete;
  StderrTo& operator=(const StderrTo&) = delete;

 private:
  const engine::FileDescriptor saved_;
};

/// Between two key presses of somebody in a hurry.
constexpr std::chrono::milliseconds kHurriedPress{150};
static_assert(kHurriedPress > kSameRequest);

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    out = engine::FileDescriptor(ends[0]);
    in = engine::FileDescriptor(ends[1]);
  }
  engine::FileDescriptor out, in;
};

auto handler_of(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler;
}

TEST(StopSignals, TheFirstReasonCountsAndIsTold) {
  const Pipe pipe;
  const StopSignals signals;
  EXPECT_EQ(stop_requested(), 0);
  {
    const StderrTo there(pipe.in.get());
    ::raise(SIGHUP);
  }
  EXPECT_EQ(stop_requested(), SIGHUP);
  request_stop(SIGPIPE);
  EXPECT_EQ(stop_requested(), SIGHUP);
  std::array<char, 200> text{};
  const ssize_t n = ::read(pipe.out.get(), text.data(), text.size());
  ASSERT_GT(n, 0);
  EXPECT_EQ(std::string(text.data(), static_cast<std::size_t>(n)),
            "SIGHUP: ending soon; another one ends at once\n");
}

/// Raises all of `signals` at one moment, however busy the machine is: they wait until the last is
/// there.
void raise_together(std::initializer_list<int> signals) {
  sigset_t held, before;
  ::sigfillset(&held);
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &held, &before), 0);
  for (const int signal : signals) ::raise(signal);
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, &before, nullptr), 0);
}

TEST(StopSignals, OneKeyPressThatArrivesTwiceIsOneRequest) {
  const Pipe pipe;
  const StderrTo there(pipe.in.get());
  const StopSignals signals;
  request_stop(SIGPIPE);  // is no first signal
  raise_together({SIGTERM, SIGHUP, SIGINT});
  EXPECT_EQ(stop_requested(), SIGPIPE);
}

TEST(StopSignals, ASecondKeyPressEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const StopSignals signals;
        ::raise(SIGINT);
        std::this_thread::sleep_for(kHurriedPress);
        ::raise(SIGINT);
      },
      ::testing::KilledBySignal(SIGINT), "SIGINT: ending soon");
}

TEST(StopSignals, AskNothingOfTheNextOnes) {
  {
    const StopSignals signals;
    request_stop(SIGTERM);
  }
  EXPECT_EQ(stop_requested(), SIGTERM);
  const StopSignals signals;
  EXPECT_EQ(stop_requested(), 0);
}

TEST(StopSignals, AreGivenBackAsTheyWere) {
  const auto before = handler_of(SIGTERM);
  ASSERT_NE(std::signal(SIGHUP, SIG_IGN), SIG_ERR);
  {
    const StopSignals signals;
    EXPECT_NE(handler_of(SIGTERM), before);
    EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
  }
  EXPECT_EQ(handler_of(SIGTERM), before);
  EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
  ASSERT_NE(std::signal(SIGHUP, SIG_DFL), SIG_ERR);
}

TEST(StopSignals, WaitForNobodyWhoDoesNotReadWhatTheySay) {
  const Pipe pipe;
  const std::string page(4096, '.');
  ASSERT_EQ(::fcntl(pipe.in.get(), F_SETFL, O_NONBLOCK), 0);
  while (::write(pipe.in.get(), page.data(), page.size()) > 0) continue;
  ASSERT_EQ(::fcntl(pipe.in.get(), F_SETFL, 0), 0);
  const StopSignals signals;
  const StderrTo there(pipe.in.get());
  ::alarm(30);  // ends a test that hangs
  ::raise(SIGTERM);
  ::alarm(0);
  EXPECT_EQ(stop_requested(), SIGTERM);
}

TEST(StopSignals, LeaveTheErrorNumberOfWhatTheyInterrupt) {
  const engine::FileDescriptor unwritable(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const StopSignals signals;
  const StderrTo there(unwritable.get());
  errno = EDOM;
  ::raise(SIGTERM);
  EXPECT_EQ(errno, EDOM);
}

TEST(StopSignals, HaveNames) {
  EXPECT_EQ(signal_name(SIGINT), "SIGINT");
  EXPECT_EQ(signal_name(SIGPIPE), "SIGPIPE");
  EXPECT_EQ(signal_name(SIGUSR1), "SIGUSR1");
  EXPECT_EQ(signal_name(SIGUSR2), "a signal");
}

}  // namespace
}  // namespace tessera::tools
