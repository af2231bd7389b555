// What is kept of each rank's last calls: all that was called, how far each came, and nothing else.
#include "comm/flight_recorder.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "engine/tensor.h"
#include "tests/testing/failing_new.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using testing::num_news;

constexpr milliseconds kLong = std::chrono::hours(1);  // waiting for it fails the test

Tensor make(std::int64_t numel, DType dtype = DType::kF32) {
  return Tensor::zeros(Memory(), {numel}, dtype, "t");
}

// "#0 all_gather f32 x 4 'h.0' finished"
std::string text_of(const FlightEntry& e) {
  return fmt::format("#{} {} {} x {}{}{} '{}' {}", e.sequence, e.op, e.dtype, e.numel,
                     e.onto_sum ? " onto a sum" : "",
                     e.root >= 0 ? fmt::format(" from {}", e.root) : "", e.label, name_of(e.state));
}

std::vector<std::string> texts_of(const RankFlight& rank) {
  std::vector<std::string> texts;
  for (const FlightEntry& entry : rank.entries) texts.push_back(text_of(entry));
  return texts;
}

TEST(FlightRecorder, KeepsAllPartsOfEveryCall) {
  const auto flight = std::make_shared<FlightRecorder>();
  run_ranks(2, {.deadline = kLong, .flight = flight}, [](ProcessGroup& world) {
    const Stream stream = Stream::worker_cpu("comm");
    world.all_gather(make(4, DType::kBF16), make(8, DType::kBF16), stream, "h.0");
    world.reduce_scatter(make(6), make(3), Accumulate::kYes, stream, "h.0");
    world.all_reduce(make(5), make(5), Accumulate::kNo, stream, "norm");
    world.broadcast(make(7, DType::kI32), 1, stream, "w");
    world.all_to_all(make(2), make(2), stream, "experts");
    stream.synchronize();
    world.declare("optimizer step 1");
    world.split(0, 0)->barrier("inside");
    world.barrier("end");
  });
  const FlightRecording recording = flight->read();
  EXPECT_EQ(recording.failed_ns, 0);
  EXPECT_THAT(recording.groups,
              ElementsAre(FlightGroup{"world", {0, 1}}, FlightGroup{"world:0", {0, 1}}));
  ASSERT_EQ(recording.ranks.size(), 2);
  for (const RankFlight& rank : recording.ranks) {
    EXPECT_EQ(rank.num_calls, 9);
    EXPECT_THAT(
        texts_of(rank),
        ElementsAre("#0 all_gather bf16 x 4 'h.0' finished",
                    "#1 reduce_scatter f32 x 3 onto a sum 'h.0' finished",
                    "#2 all_reduce f32 x 5 'norm' finished",
                    "#3 broadcast i32 x 7 from 1 'w' finished",
                    "#4 all_to_all f32 x 2 'experts' finished",
                    "#5 declare  x 0 'optimizer step 1' finished", "#6 split  x 0 '' finished",
                    "#0 barrier  x 0 'inside' finished", "#7 barrier  x 0 'end' finished"));
    EXPECT_EQ(rank.entries[7].group, 1);
    std::int64_t last_ns = 0;
    for (const FlightEntry& e : rank.entries) {
      EXPECT_GE(e.called_ns, last_ns);
      EXPECT_TRUE(e.op == "declare" || e.started_ns >= e.called_ns);
      EXPECT_GE(e.ended_ns, e.started_ns);
      EXPECT_LE(e.ended_ns, recording.now_ns);
      last_ns = e.called_ns;
    }
  }
}

TEST(FlightRecorder, KeepsTheLastThousandAndLongLabelsInPart) {
  FlightRecorder recorder;
  FlightRing& ring = recorder.ring(3);
  for (int i = 0; i < 1500; ++i) {
    const std::string label = std::to_string(i) + std::string(100, 'x');
    EXPECT_EQ(ring.called(0, i, {.op = "all_gather", .label = label}), i);
    if (i >= 500) continue;  // those whose slots others get
    ring.enter(i, FlightState::kStarted);
    ring.enter(i, FlightState::kFinished);
  }
  ring.enter(499, FlightState::kFailed);    // whose slot is another's by now
  ring.enter(500, FlightState::kFinished);  // the oldest that is kept
  ring.enter(1499, FlightState::kStarted);
  const FlightRecording recording = recorder.read();
  ASSERT_EQ(recording.ranks.size(), 1);
  const RankFlight& rank = recording.ranks[0];
  EXPECT_EQ(rank.rank, 3);
  EXPECT_EQ(rank.num_calls, 1500);
  ASSERT_EQ(rank.entries.size(), 1000);
  EXPECT_EQ(rank.entries.front().sequence, 500);
  EXPECT_EQ(rank.entries.front().label, "500" + std::string(FlightRing::kMaxLabel - 3, 'x'));
  EXPECT_EQ(rank.entries.front().state, FlightState::kFinished);
  EXPECT_EQ(rank.entries.back().sequence, 1499);
  EXPECT_EQ(rank.entries.back().state, FlightState::kStarted);
  for (std::size_t i = 1; i < 999; ++i) {
    ASSERT_EQ(rank.entries[i].state, FlightState::kCalled) << i;
    ASSERT_EQ(rank.entries[i].started_ns, 0) << i;
    ASSERT_EQ(rank.entries[i].ended_ns, 0) << i;
  }
}

TEST(FlightRecorder, KeepsWhenItFailedFirst) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.read().failed_ns, 0);
  recorder.fail();
  const std::int64_t first = recorder.read().failed_ns;
  EXPECT_GT(first, 0);
  while (recorder.read().now_ns <= first) continue;
  recorder.fail();
  EXPECT_EQ(recorder.read().failed_ns, first);
}

TEST(FlightRecorder, ARankThatNeverCallsHasNoEntryAndTheOthersSayHowLongTheyWaited) {
  const auto flight = std::make_shared<FlightRecorder>();
  EXPECT_THROW(run_ranks(3, {.deadline = milliseconds(200), .flight = flight},
                         [](ProcessGroup& world) {
                           world.barrier("begin");
                           if (world.rank() == 1) {
                             while (true) {
                               world.check();
                               std::this_thread::sleep_for(milliseconds(1));
                             }
                           }
                           const Stream stream = Stream::worker_cpu("comm");
                           world.all_gather(make(4), make(12), stream, "h.3");
                           world.all_gather(make(4), make(12), stream, "h.4");
                           stream.synchronize();
                         }),
               CommError);
  const FlightRecording recording = flight->read();
  EXPECT_THAT(texts_of(recording.ranks[1]), ElementsAre("#0 barrier  x 0 'begin' finished"));
  for (const std::size_t r : {0, 2}) {
    EXPECT_THAT(texts_of(recording.ranks[r]), ElementsAre("#0 barrier  x 0 'begin' finished",
                                                          "#1 all_gather f32 x 4 'h.3' failed",
                                                          "#2 all_gather f32 x 4 'h.4' called"));
  }
  const auto waited_ns = [&](std::size_t r) {
    return recording.failed_ns - recording.ranks[r].entries[1].started_ns;
  };
  EXPECT_GE(std::max(waited_ns(0), waited_ns(2)), 200'000'000);
}

TEST(FlightRecorder, WhatDiffersIsKeptAsItWasCalled) {
  const auto flight = std::make_shared<FlightRecorder>();
  EXPECT_THROW(run_ranks(2, {.deadline = kLong, .flight = flight},
                         [](ProcessGroup& world) { world.barrier(world.rank() == 0 ? "a" : "b"); }),
               CommError);
  const FlightRecording recording = flight->read();
  EXPECT_THAT(texts_of(recording.ranks[0]), ElementsAre("#0 barrier  x 0 'a' failed"));
  EXPECT_THAT(texts_of(recording.ranks[1]), ElementsAre("#0 barrier  x 0 'b' failed"));
  EXPECT_GT(recording.failed_ns, 0);
}

TEST(FlightRecorder, AsksForNoMemoryInACall) {
  const auto news_of = [](std::shared_ptr<FlightRecorder> flight) {
    auto groups = make_threads_world(1, {.deadline = kLong, .flight = std::move(flight)});
    const Stream stream = Stream::inline_cpu("inline");
    const Tensor in = make(4), out = make(4);
    const std::int64_t before = num_news();
    for (int i = 0; i < 100; ++i) groups[0]->all_gather(in, out, stream, "h.0");
    return num_news() - before;
  };
  EXPECT_EQ(news_of(std::make_shared<FlightRecorder>()), news_of(nullptr));
}

TEST(FlightRecorder, CanBeReadAtAnyTime) {
  const auto flight = std::make_shared<FlightRecorder>();
  std::atomic<bool> ended = false;
  auto reader = std::async(std::launch::async, [&] {
    std::int64_t num_reads = 0;
    for (; !ended; ++num_reads) {
      for (const RankFlight& rank : flight->read().ranks) {
        for (const FlightEntry& e : rank.entries) {
          const bool is_whole = (e.op == "all_gather" && e.label == "h.0" && e.numel == 4) ||
                                (e.op == "barrier" && e.label == "step" && e.numel == 0);
          EXPECT_TRUE(is_whole) << text_of(e);
        }
      }
    }
    return num_reads;
  });
  run_ranks(3, {.deadline = kLong, .flight = flight}, [](ProcessGroup& world) {
    const Stream stream = Stream::worker_cpu("comm");
    for (int i = 0; i < 300; ++i) {
      for (int j = 0; j < 4; ++j) world.all_gather(make(4), make(12), stream, "h.0");
      world.barrier("step");
    }
    stream.synchronize();
  });
  ended = true;
  EXPECT_GT(reader.get(), 0);
  for (const RankFlight& rank : flight->read().ranks) {
    EXPECT_EQ(rank.num_calls, 1500);
    for (const FlightEntry& e : rank.entries) EXPECT_EQ(e.state, FlightState::kFinished);
  }
}

}  // namespace
}  // namespace tessera::comm
