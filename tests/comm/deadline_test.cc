// Which time counts against a deadline.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "comm/threads.h"
#include "comm/world/deadline_clock.h"
#include "tests/testing/errors.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using testing::error_of;
using testing::has;

/// What check() says, if the world has failed.
std::string error_of_world(ProcessGroup& world) {
  try {
    world.check();
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

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

TEST(DeadlineClock, CountsWhatCameBeforeAPause) {
  const auto clock = std::make_shared<DeadlineClock>();
  const auto begin = clock->now();
  std::this_thread::sleep_for(milliseconds(50));
  DeadlineClock::pause(clock).reset();
  EXPECT_GE(clock->now() - begin, milliseconds(50));
}

TEST(DeadlineClock, CountsNothingOfAPauseInWhichNobodyLooked) {
  const auto clock = std::make_shared<DeadlineClock>();
  // More than once, as this thread may be held up just outside of the pause.
  auto least = DeadlineClock::duration::max();
  for (int i = 0; i < 10 && least >= milliseconds(50); ++i) {
    auto pause = DeadlineClock::pause(clock);
    const auto begin = clock->now();
    std::this_thread::sleep_for(milliseconds(100));
    pause.reset();
    least = std::min<DeadlineClock::duration>(least, clock->now() - begin);
  }
  EXPECT_LT(least, milliseconds(50));
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

// A waiting rank must look at the clock several times before such a deadline.
TEST(Deadline, MayBeLongAndStillEnds) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = error_of<CommError>([&] {
    run_ranks(2, {.deadline = milliseconds(1500)}, [&](ProcessGroup& world) {
      if (world.rank() == 0) return world.barrier("step");
      while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(5) &&
             error_of_world(world).empty()) {
        std::this_thread::sleep_for(milliseconds(20));
      }
    });
  });
  EXPECT_TRUE(has(error, {"within 1500 ms", "rank 1 is missing"}));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
}

TEST(Deadline, MayBeTheLongestThereIs) {
  run_ranks(2, {.deadline = milliseconds::max()}, [](ProcessGroup& world) {
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(100));
    world.barrier("step");
  });
}

TEST(Deadline, CountsAgainAfterAPause) {
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
