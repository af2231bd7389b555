// Which time counts against a deadline.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "comm/deadline_clock.h"
#include "comm/threads.h"
#include "tests/testing/errors.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using testing::error_of;
using testing::has;

TEST(DeadlineClock, OfALongGapBetweenTwoLooksLittleCounts) {
  DeadlineClock clock;
  const auto begin = clock.now();
  std::this_thread::sleep_for(milliseconds(700));  // as if the process had been stopped
  EXPECT_LE(clock.now() - begin, milliseconds(200));
}

TEST(DeadlineClock, ShortGapsCountInFull) {
  DeadlineClock clock;
  const auto begin = clock.now();
  const auto real = std::chrono::steady_clock::now();
  while (clock.now() - begin < milliseconds(300)) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_GE(std::chrono::steady_clock::now() - real, milliseconds(300));
}

TEST(DeadlineClock, StandsStillUntilTheLastPauseEnds) {
  const auto clock = std::make_shared<DeadlineClock>();
  auto first = DeadlineClock::pause(clock);
  auto second = DeadlineClock::pause(clock);
  const auto begin = clock->now();
  const auto look = [&] {
    for (int i = 0; i < 5; ++i) {
      std::this_thread::sleep_for(milliseconds(2));
      clock->now();
    }
  };
  look();
  first.reset();
  look();
  EXPECT_EQ(clock->now(), begin);
  second.reset();
  look();
  EXPECT_GE(clock->now() - begin, milliseconds(10));
}

TEST(Deadline, ARankThatPausesItIsWaitedFor) {
  run_ranks(3, {.deadline = milliseconds(50)}, [](ProcessGroup& world) {
    if (world.rank() == 0) {
      const auto pause = world.pause_deadline();
      std::this_thread::sleep_for(milliseconds(500));
      world.barrier("behind the disk");
      return;
    }
    world.barrier("behind the disk");
  });
}

TEST(Deadline, CountsAgainBehindAPause) {
  const std::string error = error_of<CommError>([] {
    run_ranks(2, {.deadline = milliseconds(50)}, [](ProcessGroup& world) {
      if (world.rank() == 1) {
        std::this_thread::sleep_for(milliseconds(1000));
        return;
      }
      world.pause_deadline().reset();
      world.barrier("step");
    });
  });
  EXPECT_TRUE(has(error, {"within 50 ms", "rank 1 is missing"}));
}

}  // namespace
}  // namespace tessera::comm
