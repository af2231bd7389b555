// A system whose time of day jumps by an hour back and forth: deadlines do not notice.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "comm/control/control.h"
#include "comm/threads.h"
#include "engine/error.h"
#include "tests/comm/control_processes.h"
#include "tests/testing/errors.h"

namespace {

std::atomic<int> num_looks = 0;

}  // namespace

// Stands in for the system's.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += ++num_looks % 2 == 0 ? 3600 : -3600;
  return result;
}

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using testing::error_of;
using testing::has;

// Or the tests below prove nothing.
TEST(ClockJumps, TheTimeOfDayDoesJump) {
  const auto first = std::chrono::system_clock::now(), second = std::chrono::system_clock::now();
  EXPECT_GT(std::chrono::abs(second - first), std::chrono::minutes(100));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(1));
}

TEST(ClockJumps, ARankThatIsLateWithinTheDeadlineIsWaitedFor) {
  run_ranks(3, {.deadline = std::chrono::minutes(10)}, [](ProcessGroup& world) {
    for (int i = 0; i < 3; ++i) {
      if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(150));
      world.barrier("step");
    }
  });
}

TEST(ClockJumps, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = error_of<CommError>([] {
    run_ranks(2, {.deadline = milliseconds(300)}, [](ProcessGroup& world) {
      if (world.rank() == 0) return world.barrier("step");
      std::this_thread::sleep_for(milliseconds(600));
      world.check();
    });
  });
  EXPECT_TRUE(has(error, {"within 300 ms", "rank 1 is missing"}));
  const auto elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(elapsed, milliseconds(300));
  EXPECT_LT(elapsed, std::chrono::seconds(20));
}

TEST(ClockJumps, ProcessesThatMeetWaitForTheDeadlineToo) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = error_of<engine::CommError>([] {
    Control::join(
        {.process = 1, .num_processes = 2, .address = tcp(), .deadline = milliseconds(300)});
  });
  EXPECT_TRUE(has(error, {"expected process 0", "within 300 ms"}));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(300));
}

}  // namespace
}  // namespace tessera::comm
