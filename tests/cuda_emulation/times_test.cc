// Times of a GPU's work: what they cost in events, and what counts as part of a launch.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/stream.h"
#include "tests/emulator/control.h"
#include "tests/emulator/runtime.h"

namespace tessera::engine {
namespace {

struct Launch {
  std::string name;
  std::int64_t begin_ns, end_ns;
};

struct Listener : LaunchListener {
  void on_launch(const LaunchRecord& record) noexcept override {
    launches.push_back({std::string(record.work.name), record.begin_ns, record.end_ns});
  }
  std::vector<Launch> launches;
};

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Work that lasts until it is let go.
class Gate {
 public:
  void enqueue(cudaStream_t stream) const {
    ASSERT_EQ(
        cuda_emulation::enqueue(stream, "gate", [is_open = is_open_] { is_open->wait(false); }),
        cudaSuccess);
  }
  void open() const {
    *is_open_ = true;
    is_open_->notify_all();
  }

 private:
  std::shared_ptr<std::atomic<bool>> is_open_ = std::make_shared<std::atomic<bool>>(false);
};

std::int64_t num_records() { return cuda_emulation::calls().timed_records; }

class StreamTimes : public ::testing::Test {
 protected:
  // Work of the stream that takes `ms`, by whoever has its handle.
  void enqueue(int ms) const {
    ASSERT_EQ(cuda_emulation::enqueue(native_, "work", [ms] { sleep_ms(ms); }), cudaSuccess);
  }
  void launch(const char* name, int ms = 0) const {
    compute_.launch({.name = name}, [&] { enqueue(ms); });
  }
  Gate launch_gate() const {
    Gate gate;
    compute_.launch({.name = "gate"}, [&] { gate.enqueue(native_); });
    return gate;
  }

  // Before the launch that was told after so many others.
  std::int64_t gap_before(std::size_t i) const {
    return listener_.launches.at(i).begin_ns - listener_.launches.at(i - 1).end_ns;
  }
  static std::int64_t ns(int ms) { return std::int64_t{ms} * 1'000'000; }

  Listener listener_;
  const Stream compute_ = Stream::cuda("compute", 0, {.listener = &listener_});
  // Once, as a library does.
  cudaStream_t const native_ = static_cast<cudaStream_t>(compute_.native());
};

// Launches, waits and times.
TEST_F(StreamTimes, ComeFromEventsThatAreMadeOnce) {
  const cuda_emulation::Live before = cuda_emulation::live();
  {
    const Stream stream = Stream::cuda("traced", 0, {.listener = &listener_});
    const Stream other = stream.sibling("other");
    cuda_emulation::start_counting();
    std::int64_t num_events = 0;
    constexpr int kRounds = 6, kLaunches = 100;
    for (int round = 0; round < kRounds; ++round) {
      const Gate gate;
      stream.launch({.name = "gate"},
                    [&] { gate.enqueue(static_cast<cudaStream_t>(stream.native())); });
      for (int i = 0; i < kLaunches; ++i) {
        stream.launch({.name = "work"}, [] {});
        if (i % 10 == 0) stream.wait(other.record("something"));
        if (i % 50 == 0) static_cast<void>(stream.time());
      }
      gate.open();
      stream.record("done").wait();
      static_cast<void>(stream.blocked_ns());
      // The first round makes them, and one more is held after it: the last time.
      if (round == 1) num_events = cuda_emulation::calls().timed_events;
    }
    EXPECT_GT(num_events, kLaunches);
    EXPECT_EQ(cuda_emulation::calls().timed_events, num_events);
    EXPECT_EQ(listener_.launches.size(), static_cast<std::size_t>(kRounds * (kLaunches + 1)));
  }
  EXPECT_EQ(cuda_emulation::live(), before);
}

// However many launches: as many events as stand for what the GPU has not done yet.
TEST_F(StreamTimes, NeedNoMoreEventsForMoreLaunches) {
  cuda_emulation::start_counting();
  for (int i = 0; i < 5000; ++i) {
    launch("work");
    if (i % 50 == 0) compute_.record("some").wait();
  }
  EXPECT_LE(cuda_emulation::calls().timed_events, 2 * (256 + 50 + 3));
}

TEST_F(StreamTimes, RecordOneEventALaunchOfABusyStream) {
  cuda_emulation::start_counting();
  const Gate gate = launch_gate();
  EXPECT_EQ(num_records(), 2);
  constexpr int kLaunches = 50;
  for (int i = 0; i < kLaunches; ++i) {
    launch("work");
    static_cast<void>(compute_.record("something"));  // that others wait for
  }
  EXPECT_EQ(num_records(), 2 + kLaunches);
  gate.open();
  compute_.synchronize();
  ASSERT_EQ(listener_.launches.size(), 1u + kLaunches);
  for (std::size_t i = 1; i <= kLaunches; ++i) EXPECT_EQ(gap_before(i), 0) << i;
}

TEST_F(StreamTimes, AStreamThatRanDryIsIdleAndNotAtWork) {
  launch("a");
  compute_.record("done").wait();
  sleep_ms(50);
  cuda_emulation::start_counting();
  launch("b");
  EXPECT_EQ(num_records(), 2);
  compute_.synchronize();
  ASSERT_EQ(listener_.launches.size(), 2u);
  EXPECT_GE(gap_before(1), ns(49));
}

TEST_F(StreamTimes, AWaitIsNoPartOfTheLaunchesAroundIt) {
  const Stream other = compute_.sibling("other");
  cuda_emulation::start_counting();
  const Gate first = launch_gate(), second;
  second.enqueue(static_cast<cudaStream_t>(other.native()));
  const Event done = compute_.record("done");
  compute_.wait(other.record("second"));
  launch("behind");
  EXPECT_EQ(num_records(), 2 + 1 + 1);
  first.open();
  done.wait();
  sleep_ms(20);
  second.open();
  compute_.synchronize();
  ASSERT_EQ(listener_.launches.size(), 2u);
  EXPECT_GE(gap_before(1), ns(20));
  EXPECT_NEAR(static_cast<double>(compute_.blocked_ns()), static_cast<double>(gap_before(1)), 1e3);
}

TEST_F(StreamTimes, WhatIsNoLaunchIsNoPartOfTheNext) {
  const Gate gate = launch_gate();
  EXPECT_NE(compute_.native(), nullptr);
  enqueue(20);
  launch("behind");
  gate.open();
  compute_.synchronize();
  ASSERT_EQ(listener_.launches.size(), 2u);
  EXPECT_GE(gap_before(1), ns(20));
}

TEST_F(StreamTimes, ALaunchThatFailedIsNoPartOfTheNext) {
  const Gate gate = launch_gate();
  EXPECT_THROW(compute_.launch({.name = "fails"},
                               [&] {
                                 enqueue(20);
                                 throw std::runtime_error("planted");
                               }),
               std::runtime_error);
  launch("behind");
  gate.open();
  compute_.synchronize();
  ASSERT_EQ(listener_.launches.size(), 2u);
  EXPECT_GE(gap_before(1), ns(20));
}

// Launches have no times of their own there.
TEST_F(StreamTimes, OfWaitsLeaveOutTheLaunchesBetweenThem) {
  const Stream stream = Stream::cuda("untold", 0);
  auto* const native = static_cast<cudaStream_t>(stream.native());
  const Gate gate;
  gate.enqueue(native_);
  const std::shared_ptr<const StreamTime> begin = stream.time();
  stream.wait(compute_.record("gate"));
  stream.launch({.name = "work"}, [&] {
    ASSERT_EQ(cuda_emulation::enqueue(native, "work", [] { sleep_ms(20); }), cudaSuccess);
  });
  stream.wait(compute_.record("gate"));
  const std::shared_ptr<const StreamTime> end = stream.time();
  gate.open();
  stream.synchronize();
  ASSERT_TRUE(end->is_known);
  EXPECT_GE(end->ns - begin->ns - (end->blocked_ns - begin->blocked_ns), ns(20));
}

// Delays that tests ask for stand before a launch.
TEST_F(StreamTimes, DelaysAreNoPartOfALaunch) {
  const Stream late = Stream::cuda("late", 0, {.listener = &listener_, .delay_seed = 1});
  cuda_emulation::start_counting();
  constexpr int kLaunches = 20;
  for (int i = 0; i < kLaunches; ++i) late.launch({.name = "work"}, [] {});
  EXPECT_EQ(num_records(), 2 * kLaunches);
}

}  // namespace
}  // namespace tessera::engine
