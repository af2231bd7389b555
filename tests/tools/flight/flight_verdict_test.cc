// What recordings of worlds that failed are said to mean, one way of failing after the other.
#include "tools/flight/flight_verdict.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "engine/tensor.h"
#include "tests/testing/errors.h"
#include "tests/testing/failing_new.h"

namespace tessera::tools {
namespace {

using comm::FlightRecorder;
using comm::ProcessGroup;
using engine::Stream;
using engine::Tensor;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using testing::error_of;
using testing::has;
using ::testing::MatchesRegex;

constexpr milliseconds kPatient = std::chrono::hours(1);  // waiting for it fails the test

void gather(ProcessGroup& group, const Stream& stream, std::string_view label) {
  const engine::Memory memory;
  group.all_gather(Tensor::zeros(memory, {4}, engine::DType::kF32, "in"),
                   Tensor::zeros(memory, {4 * group.size()}, engine::DType::kF32, "out"), stream,
                   label);
}

// What `fn` on four ranks leaves.
FlightFile recording_of(
    milliseconds deadline, const std::function<void(ProcessGroup&)>& fn,
    const std::shared_ptr<FlightRecorder>& flight = std::make_shared<FlightRecorder>()) {
  FlightFile file{.path = "flight.json", .error = "", .recording = {}};
  try {
    comm::run_ranks(4, {.deadline = deadline, .flight = flight}, fn);
  } catch (const std::exception& error) {
    file.error = error.what();
  }
  file.recording = flight->read();
  return file;
}

FlightVerdict judge_one(const FlightFile& file) { return judge({&file, 1}); }

// Until the others have given up.
void stay_away(ProcessGroup& world) {
  while (true) {
    world.check();
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(FlightVerdict, ARankThatNeverCalledIsNamedWithWhoWaitsAndSinceWhen) {
  const FlightFile file = recording_of(milliseconds(1200), [](ProcessGroup& world) {
    const Stream stream = Stream::worker_cpu("comm");
    for (const char* label : {"h.0", "h.1", "h.2"}) gather(world, stream, label);
    stream.synchronize();
    if (world.rank() == 1) stay_away(world);
    gather(world, stream, "h.3");
    gather(world, stream, "h.4");  // enqueued, and no cause
    stream.synchronize();
  });
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(verdict.finding, FlightFinding::kLate);
  EXPECT_THAT(
      verdict.lines,
      ElementsAre(
          MatchesRegex("rank 1 never called all_gather f32 x 4 'h\\.3' \\(call 3 of world\\)"
                       ", which ranks 0, 2-3 wait for since 1\\.[2-9] s"),
          MatchesRegex("  rank 1 called last all_gather f32 x 4 'h\\.2' \\(call 2 of world\\)"
                       ", which it finished 1\\.[2-9] s before")));
}

TEST(FlightVerdict, ARankWithOtherWorkBeforeItsCallIsNamed) {
  const FlightFile file = recording_of(milliseconds(300), [](ProcessGroup& world) {
    const Stream stream = Stream::worker_cpu("comm");
    if (world.rank() == 2) {
      stream.launch({.name = "slow"}, [&] { std::this_thread::sleep_for(milliseconds(900)); });
    }
    gather(world, stream, "h.0");
    stream.synchronize();
  });
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(verdict.finding, FlightFinding::kLate);
  ASSERT_FALSE(verdict.lines.empty());
  EXPECT_THAT(
      verdict.lines[0],
      MatchesRegex("rank 2 called all_gather f32 x 4 'h\\.0' \\(call 0 of world\\), but had "
                   "other work before it, and ranks 0-1, 3 wait for since .* s"));
}

TEST(FlightVerdict, ARankThatCallsWhenTheOthersHaveGivenUpIsNamed) {
  const FlightFile file = recording_of(milliseconds(200), [](ProcessGroup& world) {
    if (world.rank() == 0) std::this_thread::sleep_for(milliseconds(700));
    world.barrier("begin");
  });
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(verdict.finding, FlightFinding::kLate);
  EXPECT_THAT(verdict.lines,
              ElementsAre(MatchesRegex(
                  "rank 0 called barrier 'begin' \\(call 0 of world\\) 0\\..* s after the ranks "
                  "had failed, and ranks 1-3 wait for since .* s")));
}

TEST(FlightVerdict, ARankThatThrowsIsTheOneThatNeverCalled) {
  const FlightFile file = recording_of(kPatient, [](ProcessGroup& world) {
    const Stream stream = Stream::worker_cpu("comm");
    if (world.rank() == 3) {
      std::this_thread::sleep_for(milliseconds(50));
      throw std::runtime_error("the data is bad");
    }
    gather(world, stream, "h.0");
    stream.synchronize();
  });
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(file.error, "the data is bad");
  EXPECT_EQ(verdict.finding, FlightFinding::kLate);
  ASSERT_EQ(verdict.lines.size(), 2);
  EXPECT_TRUE(has(verdict.lines[0], {"rank 3 never called all_gather f32 x 4 'h.0'"}));
  EXPECT_EQ(verdict.lines[1], "  rank 3 called nothing at all");
}

TEST(FlightVerdict, ARankWhoseOwnCallFailsIsNamedAndTheOthersAreToldAtOnce) {
  const auto flight = std::make_shared<FlightRecorder>();
  const auto num_waiting = [&] {
    const comm::FlightRecording now = flight->read();
    return std::ranges::count_if(now.ranks, [](const comm::RankFlight& rank) {
      return !rank.entries.empty() && rank.entries.back().state == comm::FlightState::kStarted;
    });
  };
  const FlightFile file = recording_of(
      milliseconds(10'000),  // which nobody waits for
      [&](ProcessGroup& world) {
        const Stream stream = Stream::worker_cpu("comm");
        if (world.rank() == 2) {
          stream.launch({.name = "uses all memory"}, [&] {
            while (num_waiting() < 3) std::this_thread::sleep_for(milliseconds(1));
            testing::fail_new_after(0, testing::Fails::kOne);
          });
        }
        gather(world, stream, "h.0");
        if (world.rank() == 2) stay_away(world);  // and looks at no stream
        stream.synchronize();
      },
      flight);
  testing::never_fail_new();
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(file.error, "[abort] by rank 2: std::bad_alloc");
  EXPECT_EQ(verdict.finding, FlightFinding::kLate);
  EXPECT_THAT(verdict.lines,
              ElementsAre(MatchesRegex("rank 2 failed in all_gather f32 x 4 'h\\.0' \\(call 0 of "
                                       "world\\), which ranks 0-1, 3 wait for since .* s")));
}

TEST(FlightVerdict, TheFirstCallAtWhichRanksDifferIsNamedWithBothSides) {
  const FlightFile file = recording_of(kPatient, [](ProcessGroup& world) {
    const Stream stream = Stream::worker_cpu("comm");
    gather(world, stream, "h.0");
    gather(world, stream, world.rank() == 2 ? "h.2" : "h.1");
    gather(world, stream, world.rank() == 2 ? "h.1" : "h.2");
    stream.synchronize();
  });
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(verdict.finding, FlightFinding::kDiffer);
  EXPECT_THAT(verdict.lines,
              ElementsAre("ranks differ first at call 1 of world: ranks 0-1, 3: all_gather f32 x 4 "
                          "'h.1'; rank 2: all_gather f32 x 4 'h.2'"));
}

// Ranks 0 and 1 wait for 2 and 3, of which 3 waits for 2: only that is the cause.
TEST(FlightVerdict, OfRanksThatWaitForEachOtherTheCauseComesFirst) {
  const FlightFile file = recording_of(milliseconds(400), [](ProcessGroup& world) {
    const auto pair = world.split(world.rank() / 2, 0);
    if (world.rank() == 2) stay_away(world);
    if (world.rank() == 3) pair->barrier("pair");
    world.barrier("all");
  });
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(verdict.finding, FlightFinding::kLate);
  std::string text;
  for (const std::string& line : verdict.lines) text += line + "\n";
  EXPECT_THAT(
      verdict.lines,
      ElementsAre(MatchesRegex("ranks 2-3 never called barrier 'all' \\(call 1 of world\\), which "
                               "ranks 0-1 wait for since .* s"),
                  MatchesRegex("  rank 2 called last split .*"),
                  "  rank 3 waits in barrier 'pair' (call 0 of world:1, ranks 2-3)",
                  MatchesRegex("rank 2 never called barrier 'pair' \\(call 0 of world:1, ranks "
                               "2-3\\), which rank 3 waits for since .* s"),
                  MatchesRegex("  rank 2 called last split .*")))
      << text;
}

TEST(FlightVerdict, WhatFailedOutsideOfCollectivesIsSaidToHave) {
  const FlightFile file = recording_of(kPatient, [](ProcessGroup& world) {
    world.barrier("end");
    throw std::runtime_error("the disk is full");
  });
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(verdict.finding, FlightFinding::kFinished);
  ASSERT_EQ(verdict.lines.size(), 5);
  EXPECT_TRUE(has(verdict.lines[0], {"no rank waited for another"}));
  EXPECT_TRUE(has(verdict.lines[4], {"rank 3 called last barrier 'end' (call 0 of world)"}));
}

// A world of processes: a recording each.
std::vector<FlightFile> split_by_rank(const FlightFile& whole) {
  std::vector<FlightFile> files;
  for (const comm::RankFlight& rank : whole.recording.ranks) {
    FlightFile& file = files.emplace_back(whole);
    file.path = fmt::format("{}.json", rank.rank);
    file.recording.ranks = {rank};
  }
  return files;
}

TEST(FlightVerdict, FilesOfSeveralProcessesSayTheSameAsOne) {
  const FlightFile whole = recording_of(milliseconds(200), [](ProcessGroup& world) {
    if (world.rank() == 1) stay_away(world);
    world.barrier("begin");
  });
  std::vector<FlightFile> files = split_by_rank(whole);
  EXPECT_EQ(judge(files).lines, judge_one(whole).lines);
  EXPECT_EQ(judge(files).finding, FlightFinding::kLate);
  // Without the file of the rank that is late nobody can say more than this.
  files.erase(files.begin() + 1);
  const FlightVerdict without = judge(files);
  EXPECT_EQ(without.finding, FlightFinding::kLate);
  ASSERT_EQ(without.lines.size(), 1);
  EXPECT_TRUE(has(without.lines[0], {"rank 1 may be late for barrier 'begin'", "ranks 0, 2-3 wait",
                                     "the files do not tell"}));
  files[1] = files[0];
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { judge(files); }), {"rank 0 again", "0.json"}));
  files[1].recording.groups[0].members = {0, 1};
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { judge(files); }),
                  {"files of one world", "4 ranks", "2"}));
}

// A rank whose stream fails in a call that all have come to.
TEST(FlightVerdict, ACallThatAllHaveComeToAndSomeDidNotFinishIsNamed) {
  FlightFile file = recording_of(kPatient, [](ProcessGroup& world) { world.barrier("a"); });
  for (const std::size_t r : {1, 2}) {
    file.recording.ranks[r].entries[0].state = comm::FlightState::kStarted;
    file.recording.ranks[r].entries[0].ended_ns = 0;
  }
  const FlightVerdict verdict = judge_one(file);
  EXPECT_EQ(verdict.finding, FlightFinding::kUnfinished);
  EXPECT_THAT(verdict.lines, ElementsAre("all have come to barrier 'a' (call 0 of world), and "
                                         "ranks 1-2 did not finish it"));
}

TEST(FlightVerdict, ARankThatHasForgottenACallIsNotMissedThere) {
  const FlightFile file = recording_of(milliseconds(300), [](ProcessGroup& world) {
    const auto pair = world.split(world.rank() / 2, 0);
    if (world.rank() == 1) {
      pair->barrier("pair");
      for (int i = 0; i < 1100; ++i) world.declare("step");
      stay_away(world);
    }
    if (world.rank() == 0) pair->barrier("pair");
    for (int i = 0; i < 1100; ++i) world.declare("step");
    world.barrier("all");
  });
  const FlightVerdict verdict = judge_one(file);
  ASSERT_FALSE(verdict.lines.empty());
  EXPECT_TRUE(has(verdict.lines[0], {"rank 1 never called barrier 'all' (call 1101 of world)"}));
  EXPECT_EQ(verdict.lines.size(), 2);
}

TEST(FlightVerdict, OfNothingNothingIsSaid) {
  EXPECT_EQ(judge({}).finding, FlightFinding::kFinished);
  EXPECT_THAT(judge({}).lines, ElementsAre("no rank has called anything"));
}

}  // namespace
}  // namespace tessera::tools
