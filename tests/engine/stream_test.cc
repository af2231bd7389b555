// Streams: order, events that carry errors, what listeners are told, destruction.
#include "engine/stream.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

using std::chrono::milliseconds;
using tessera::testing::error_of;

// A door that work can wait behind.
class Gate {
 public:
  void open() { promise_.set_value(); }
  std::function<void()> pass() {
    return [future = future_] { future.wait(); };
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future();
};

struct Seen {
  std::string name, detail, stream;
  double flops;
  std::int64_t bytes_read, bytes_written, begin_ns, end_ns;
};

class Listener : public LaunchListener {
 public:
  void on_launch(const LaunchRecord& r) noexcept override {
    const std::lock_guard lock(mutex_);
    seen_.push_back({std::string(r.work.name), r.work.detail, r.stream, r.work.flops,
                     r.work.bytes_read, r.work.bytes_written, r.begin_ns, r.end_ns});
  }
  std::vector<Seen> seen() {
    const std::lock_guard lock(mutex_);
    return seen_;
  }

 private:
  std::mutex mutex_;
  std::vector<Seen> seen_;
};

TEST(InlineStream, RunsAtOnceInTheCallingThread) {
  const Stream stream = Stream::inline_cpu("compute");
  std::vector<int> order;
  std::thread::id thread;
  stream.launch({.name = "a"}, [&] {
    order.push_back(1);
    thread = std::this_thread::get_id();
  });
  order.push_back(2);
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_EQ(thread, std::this_thread::get_id());
  EXPECT_TRUE(stream.record("done").reached());
  EXPECT_EQ(stream.name(), "compute");
  stream.synchronize();
}

TEST(InlineStream, LaunchThrowsItsErrorAndGoesOn) {
  const Stream stream = Stream::inline_cpu("compute");
  EXPECT_EQ(error_of<DeviceError>(
                [&] { stream.launch({.name = "bad"}, [] { throw DeviceError("broken"); }); }),
            "broken");
  bool ran = false;
  stream.launch({.name = "good"}, [&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(WorkerStream, RunsInOrderInAThreadOfItsOwn) {
  const Stream stream = Stream::worker_cpu("comm");
  std::vector<int> order;
  std::thread::id thread;
  for (int i = 0; i < 100; ++i) {
    stream.launch({.name = "step"}, [&, i] {
      order.push_back(i);
      thread = std::this_thread::get_id();
    });
  }
  stream.record("done").wait();
  EXPECT_NE(thread, std::this_thread::get_id());
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(WorkerStream, LaunchDoesNotWaitAndEventsMarkTheirMoment) {
  const Stream stream = Stream::worker_cpu("comm");
  Gate gate;
  stream.launch({.name = "held"}, gate.pass());
  const Event before = stream.record("before");
  bool ran = false;
  stream.launch({.name = "after"}, [&] { ran = true; });
  const Event after = stream.record("after");
  EXPECT_FALSE(before.reached());
  EXPECT_FALSE(after.reached());
  gate.open();
  after.wait();
  EXPECT_TRUE(before.reached());
  EXPECT_TRUE(ran);
}

TEST(WorkerStream, CapturesDieBeforeTheEventIsReached) {
  const Stream stream = Stream::worker_cpu("comm");
  auto held = std::make_shared<int>(1);
  stream.launch({.name = "holds"}, [held] {});
  stream.synchronize();
  EXPECT_EQ(held.use_count(), 1);
}

TEST(WorkerStream, WhatATaskHoldsIsGoneWhenItIsWaitedFor) {
  struct Slow {
    std::atomic<bool>& gone;
    explicit Slow(std::atomic<bool>& gone) : gone(gone) {}
    ~Slow() {
      std::this_thread::sleep_for(milliseconds(50));
      gone = true;
    }
  };
  const Stream stream = Stream::worker_cpu("comm");
  std::atomic<bool> gone = false;
  stream.launch({.name = "holds"}, [held = std::make_shared<Slow>(gone)] {});
  stream.synchronize();
  EXPECT_TRUE(gone);
}

TEST(WorkerStream, SynchronizeDoesNotWaitForWhatComesLater) {
  const Stream stream = Stream::worker_cpu("comm");
  Gate first, second;
  stream.launch({.name = "first"}, first.pass());
  auto waiting = std::async(std::launch::async, [&] { stream.synchronize(); });
  waiting.wait_for(milliseconds(50));
  stream.launch({.name = "second"}, second.pass());
  first.open();
  EXPECT_EQ(waiting.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  second.open();
}

TEST(WorkerStream, EveryoneWhoWaitsIsWoken) {
  const Stream stream = Stream::worker_cpu("comm");
  Gate gate;
  stream.launch({.name = "held"}, gate.pass());
  const Event event = stream.record("held");
  std::vector<std::future<void>> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.push_back(std::async(std::launch::async, [&] { stream.synchronize(); }));
    waiting.push_back(std::async(std::launch::async, [&] { event.wait(); }));
  }
  std::this_thread::sleep_for(milliseconds(50));
  ::alarm(30);  // ends a test that hangs
  gate.open();
  for (auto& w : waiting) w.get();
  ::alarm(0);
}

TEST(Event, DefaultIsReached) {
  const Event event;
  EXPECT_TRUE(event.reached());
  event.wait();
  const Stream stream = Stream::worker_cpu("comm");
  stream.wait(event);
  stream.synchronize();
}

TEST(Event, OrdersOneStreamAfterAnother) {
  const Stream first = Stream::worker_cpu("first"), second = Stream::worker_cpu("second");
  Gate gate;
  std::atomic<int> value = 0;
  first.launch({.name = "held"}, gate.pass());
  first.launch({.name = "write"}, [&] { value = 1; });
  second.wait(first.record("written"));
  int read = -1;
  second.launch({.name = "read"}, [&] { read = value; });
  const Event done = second.record("read");
  EXPECT_FALSE(done.reached());
  gate.open();
  done.wait();
  EXPECT_EQ(read, 1);
}

TEST(Errors, AreCarriedByEventsAfterThemAndLaterWorkIsSkipped) {
  const Stream stream = Stream::worker_cpu("comm");
  const Event before = stream.record("before");
  stream.launch({.name = "bad"}, [] { throw CommError("peer gone"); });
  stream.launch({.name = "worse"}, [] { throw DeviceError("never thrown"); });
  bool ran = false;
  stream.launch({.name = "skipped"}, [&] { ran = true; });
  const Event after = stream.record("after");
  before.wait();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(error_of<CommError>([&] { after.wait(); }), "peer gone");
    EXPECT_EQ(error_of<CommError>([&] { stream.synchronize(); }), "peer gone");
  }
  EXPECT_TRUE(after.reached());
  EXPECT_FALSE(ran);
  EXPECT_EQ(error_of<CommError>([&] { Stream::inline_cpu("compute").wait(after); }), "peer gone");
}

TEST(Errors, SpreadToStreamsThatWait) {
  const Stream first = Stream::worker_cpu("first"), second = Stream::worker_cpu("second");
  first.launch({.name = "bad"}, [] { throw CommError("peer gone"); });
  second.wait(first.record("never"));
  bool ran = false;
  second.launch({.name = "skipped"}, [&] { ran = true; });
  EXPECT_EQ(error_of<CommError>([&] { second.synchronize(); }), "peer gone");
  EXPECT_FALSE(ran);
}

TEST(Listener, IsToldOfEveryLaunchInOrder) {
  for (const bool is_inline : {true, false}) {
    Listener listener;
    const StreamOptions options{.listener = &listener};
    const Stream stream =
        is_inline ? Stream::inline_cpu("s", options) : Stream::worker_cpu("s", options);
    stream.launch(
        {.name = "gemm", .flops = 6e9, .bytes_read = 10, .bytes_written = 20, .detail = "h.0"},
        [] { std::this_thread::sleep_for(milliseconds(2)); });
    stream.wait(Event());
    stream.launch({.name = "empty"}, [] {});
    stream.synchronize();
    const std::vector<Seen> seen = listener.seen();
    ASSERT_EQ(seen.size(), 2u);
    EXPECT_EQ(seen[0].name, "gemm");
    EXPECT_EQ(seen[0].detail, "h.0");
    EXPECT_EQ(seen[0].stream, "s");
    EXPECT_EQ(seen[0].flops, 6e9);
    EXPECT_EQ(seen[0].bytes_read, 10);
    EXPECT_EQ(seen[0].bytes_written, 20);
    EXPECT_GE(seen[0].end_ns - seen[0].begin_ns, 2'000'000);
    EXPECT_EQ(seen[1].name, "empty");
    EXPECT_GE(seen[1].begin_ns, seen[0].end_ns);
  }
}

// Takes every other launch, and remembers what it was asked.
class Choosy : public LaunchListener {
 public:
  std::optional<std::uint64_t> on_enqueue(const LaunchRequest& request) noexcept override {
    asked.push_back(std::string(request.work.name) + " " + request.stream + " " +
                    std::string(request.scope.block) + " " + std::string(request.scope.phase));
    thread = std::this_thread::get_id();
    if (asked.size() % 2 == 0) return std::nullopt;
    return asked.size();
  }
  void on_launch(const LaunchRecord& record) noexcept override {
    told.emplace_back(std::string(record.work.name), record.ticket);
  }

  std::vector<std::string> asked;
  std::thread::id thread;
  std::vector<std::pair<std::string, std::uint64_t>> told;
};

TEST(Listener, IsAskedBeforeALaunchAndToldOfWhatItTakes) {
  for (const bool is_inline : {true, false}) {
    Choosy listener;
    {
      const StreamOptions options{.listener = &listener};
      const Stream stream =
          is_inline ? Stream::inline_cpu("s", options) : Stream::worker_cpu("s", options);
      Gate gate;
      if (is_inline) gate.open();
      stream.launch({.name = "a"}, gate.pass());
      stream.push_scope({"root", "forward"});
      stream.launch({.name = "b"}, [] {});
      stream.push_scope({"h.0", "backward"});
      stream.launch({.name = "c"}, [] {});
      stream.pop_scope();
      stream.launch({.name = "d"}, [] {});
      stream.pop_scope();
      stream.launch({.name = "e"}, [] {});
      EXPECT_EQ(listener.asked,
                (std::vector<std::string>{"a s  ", "b s root forward", "c s h.0 backward",
                                          "d s root forward", "e s  "}))
          << "when it is launched, not when it runs";
      EXPECT_EQ(listener.thread, std::this_thread::get_id());
      if (!is_inline) gate.open();
    }
    EXPECT_EQ(listener.told,
              (std::vector<std::pair<std::string, std::uint64_t>>{{"a", 1}, {"c", 3}, {"e", 5}}));
  }
}

TEST(BlockedTime, CountsWaitsOfInlineStreamsOnly) {
  const Stream compute = Stream::inline_cpu("compute"), comm = Stream::worker_cpu("comm");
  compute.launch({.name = "work"}, [] { std::this_thread::sleep_for(milliseconds(2)); });
  EXPECT_EQ(compute.blocked_ns(), 0);
  comm.launch({.name = "slow"}, [] { std::this_thread::sleep_for(milliseconds(5)); });
  const auto begin = std::chrono::steady_clock::now();
  compute.wait(comm.record("done"));
  const auto waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GT(compute.blocked_ns(), 0);
  EXPECT_LE(compute.blocked_ns(), std::chrono::nanoseconds(waited).count());
  const std::int64_t blocked = compute.blocked_ns();
  compute.wait(Event());
  EXPECT_EQ(compute.blocked_ns(), blocked);
  comm.launch({.name = "bad"}, [] {
    std::this_thread::sleep_for(milliseconds(2));
    throw CommError("late and wrong");
  });
  EXPECT_THROW(compute.wait(comm.record("never")), CommError);
  EXPECT_GT(compute.blocked_ns(), blocked) << "a wait that fails counts as well";
  EXPECT_EQ(comm.blocked_ns(), 0);
}

TEST(DelaySeed, DelaysAndChangesNoOrder) {
  for (const bool is_inline : {true, false}) {
    const StreamOptions options{.delay_seed = 7};
    const Stream stream =
        is_inline ? Stream::inline_cpu("s", options) : Stream::worker_cpu("s", options);
    std::vector<int> order;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; ++i) stream.launch({.name = "step"}, [&, i] { order.push_back(i); });
    stream.synchronize();
    // Twenty sleeps of 0..1 ms last 10 ms on average.
    EXPECT_GT(std::chrono::steady_clock::now() - begin, milliseconds(3));
    ASSERT_EQ(order.size(), 20u);
    for (int i = 0; i < 20; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  }
}

TEST(Destruction, DrainsWhatWasLaunched) {
  std::atomic<int> count = 0;
  Event last;
  {
    const Stream stream = Stream::worker_cpu("comm", {.delay_seed = 3});
    const Stream copy = stream;
    for (int i = 0; i < 10; ++i) copy.launch({.name = "step"}, [&] { ++count; });
    last = copy.record("last");
  }
  EXPECT_EQ(count, 10);
  ASSERT_TRUE(last.reached());
  last.wait();
}

TEST(Destruction, SwallowsTheErrorNobodyAskedFor) {
  Event last;
  {
    const Stream stream = Stream::worker_cpu("comm");
    stream.launch({.name = "bad"}, [] { throw CommError("peer gone"); });
    last = stream.record("last");
  }
  ASSERT_TRUE(last.reached());
  EXPECT_THROW(last.wait(), CommError);
}

}  // namespace
}  // namespace tessera::engine
