// Ranks that are real processes, or threads of several, with an emulated GPU each, over the
// emulated NCCL: the conformance suite, and what becomes of the others when one dies, leaves,
// fails, or calls something else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/flight_recording.h"
#include "comm/nccl.h"
#include "engine/error.h"
#include "tests/comm/control_processes.h"
#include "tests/comm/paused_processes.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_processes.h"
#include "tests/emulator/control.h"
#include "tests/emulator/nccl_control.h"

namespace tessera::comm {
namespace {

using engine::DType;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Where the processes of one world meet, and what they prove to each other. Made before they are.
class Meeting {
 public:
  Meeting() {
    std::random_device random;
    for (int i = 0; i < 4; ++i) secret_ += std::to_string(random());
  }
  ControlOptions options(int process, int size) const {
    ControlOptions options = options_of(address_, process, size);
    options.secret = secret_;
    return options;
  }

 private:
  std::string address_ = tcp() + "+15", secret_;
};

Stream on_own_gpu(int rank, std::string name, engine::StreamOptions options) {
  return Stream::cuda(std::move(name), rank, options);
}

std::vector<std::string> over_nccl(int size, milliseconds deadline, const RankFunction& fn) {
  const Meeting meeting;
  return said_by_processes(
      size,
      [&](int process) {
        return join_nccl(meeting.options(process, size), process, {.deadline = deadline});
      },
      fn);
}

// GPU r for rank r.
std::vector<int> gpus_of(int process, int num_threads) {
  std::vector<int> gpus(static_cast<std::size_t>(num_threads));
  std::iota(gpus.begin(), gpus.end(), process * num_threads);
  return gpus;
}

// Two ranks a process, or all of an odd number in one.
std::vector<std::string> by_threads_over_nccl(int size, milliseconds deadline,
                                              const RankFunction& fn) {
  const int num_threads = size % 2 == 0 ? 2 : size;
  const Meeting meeting;
  return said_by_threads_of_processes(
      size, num_threads, fn, [&](int process, const std::function<void(ProcessGroup&)>& each) {
        run_joined_nccl_ranks(meeting.options(process, size / num_threads),
                              {.deadline = deadline, .gpus = gpus_of(process, num_threads)}, each);
      });
}

Backend backend(std::string name, decltype(Backend::run) run, std::vector<int> sizes) {
  return {.name = std::move(name),
          .run = std::move(run),
          .here = on_own_gpu,
          .beside = on_own_gpu,
          .num_large = 5003,
          // Several of the beats that tell what the others called last: nothing else here does.
          .deadline = milliseconds(3000),
          .sizes = std::move(sizes)};
}

INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest,
                         ::testing::Values(backend("nccl", over_nccl, {1, 2, 3, 4}),
                                           backend("threads", by_threads_over_nccl, {4, 6})),
                         backend_name);

using Body = std::function<void(ProcessGroup&, const Child::Say&)>;
using Prepare = std::function<void(int process)>;

// Processes that join, each on its GPU, do `body`, leave, and say "left". What they say besides is
// of `body`, or the error that ended it.
std::vector<Child> joined_all(int size, milliseconds deadline, const Body& body,
                              const Prepare& prepare = {}) {
  const Meeting meeting;
  std::vector<Child> children;
  for (int p = 0; p < size; ++p) {
    children.emplace_back([=](const Child::Say& say) {
      if (prepare) prepare(p);
      {
        const auto group = join_nccl(meeting.options(p, size), p, {.deadline = deadline});
        try {
          body(*group, say);
        } catch (const engine::CommError& error) {
          say(error.what());
        }
      }
      say("left");
    });
  }
  return children;
}

// joined_all() of processes with two ranks each, which both do `body`.
std::vector<Child> pairs_all(int num_processes, milliseconds deadline, const Body& body,
                             const Prepare& prepare = {}) {
  const Meeting meeting;
  std::vector<Child> children;
  for (int p = 0; p < num_processes; ++p) {
    children.emplace_back([=](const Child::Say& say) {
      if (prepare) prepare(p);
      run_joined_nccl_ranks(meeting.options(p, num_processes),
                            {.deadline = deadline, .gpus = gpus_of(p, 2)},
                            [&](ProcessGroup& group) {
                              try {
                                body(group, say);
                              } catch (const engine::CommError& error) {
                                say(error.what());
                              }
                            });
      say("left");
    });
  }
  return children;
}

// Sums that never end; says "sums" when the first is there.
void sum_for_ever(ProcessGroup& group, const Child::Say& say) {
  const Place here{on_own_gpu(group.rank(), "comm", {})};
  const Tensor sum = Tensor::zeros(here.memory, {1 << 14}, DType::kF32, "sum");
  for (int i = 0;; ++i) {
    group.all_reduce(sum, sum, Accumulate::kNo, here.stream, "sum");
    here.stream.synchronize();
    group.check();
    if (i == 0) say("sums");
  }
}

// Whether NCCL notices that a process has gone, or never does.
TEST(NcclProcessesTest, AProcessThatIsKilledIsNamedByTheOthers) {
  for (const bool notices : {true, false}) {
    for (int killed = 0; killed < 3; ++killed) {
      auto children = joined_all(3, kLong, sum_for_ever, [=](int) {
        if (!notices) cuda_emulation::ignore_lost_processes();
      });
      for (Child& child : children) EXPECT_EQ(child.hear(), "sums");
      children[std::size_t(killed)].end();
      for (int p = 0; p < 3; ++p) {
        if (p == killed) continue;
        EXPECT_THAT(children[std::size_t(p)].hear(),
                    AllOf(StartsWith("[control] "),
                          HasSubstr("lost process " + std::to_string(killed) + " (")));
        EXPECT_EQ(children[std::size_t(p)].hear(), "left");
      }
    }
  }
}

TEST(NcclProcessesTest, AProcessThatStopsForLongerThanTheDeadlineIsNamed) {
  auto children = joined_all(3, milliseconds(2000), sum_for_ever);
  for (Child& child : children) EXPECT_EQ(child.hear(), "sums");
  children[1].signal(SIGSTOP);
  for (const std::size_t p : {0, 2}) {
    EXPECT_THAT(children[p].hear(),
                AnyOf(HasSubstr("lost process 1 ("), HasSubstr("rank 1 is missing")));
    EXPECT_EQ(children[p].hear(), "left");
  }
}

TEST(NcclProcessesTest, AProcessThatReturnsEarlyIsNamedAtOnce) {
  for (const bool in_barrier : {true, false}) {
    for (int early = 0; early < 3; ++early) {
      auto children = joined_all(3, kLong, [=](ProcessGroup& group, const auto&) {
        const Caller c{group, {on_own_gpu(group.rank(), "comm", {})}};
        group.barrier("begin");
        if (group.rank() == early) return;
        if (in_barrier) group.barrier("end");
        c.gather(4, "h.0");
      });
      EXPECT_EQ(children[std::size_t(early)].hear(), "left");
      const std::string call = in_barrier ? "barrier 'end'" : "all_gather f32 x 4 'h.0'";
      for (int p = 0; p < 3; ++p) {
        if (p == early) continue;
        EXPECT_EQ(children[std::size_t(p)].hear(),
                  "[" + call.substr(0, call.find(' ')) +
                      " #1 of world] expected 3 ranks, got: rank " + std::to_string(early) +
                      " has left the group, last seen in #0 barrier 'begin' of world; " + call);
        EXPECT_EQ(children[std::size_t(p)].hear(), "left");
      }
    }
  }
}

TEST(NcclProcessesTest, WhatOneProcessFailsWithEndsAll) {
  for (const bool throws : {true, false}) {
    auto children = joined_all(3, kLong, [=](ProcessGroup& group, const auto& say) {
      group.barrier("begin");
      if (group.rank() == 1 && throws) throw std::runtime_error("no more data");
      if (group.rank() == 1) group.abort("the loader died");
      sum_for_ever(group, say);
    });
    for (const std::size_t p : {0, 2}) {
      EXPECT_EQ(children[p].hear(), throws ? "[abort] by rank 1: an exception ends its group"
                                           : "[abort] by rank 1: the loader died");
      EXPECT_EQ(children[p].hear(), "left");
    }
  }
}

// On streams that come to each copy some time after the abort.
TEST(NcclProcessesTest, WhatAnAbortLeavesToBeCopiedFindsItsMemory) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    auto children = joined_all(
        3, kLong,
        [](ProcessGroup& group, const auto&) {
          const auto part = group.split(0, 0);
          if (group.rank() == 2) group.abort("the loader died");
          part->barrier("wait");
        },
        [=](int) { cuda_emulation::configure({.num_devices = 3, .delay_seed = seed}); });
    for (Child& child : children) {
      EXPECT_EQ(child.hear(), "[abort] by rank 2: the loader died");
      EXPECT_EQ(child.hear(), "left");
    }
  }
}

// NCCL itself hangs where calls differ; or takes one for the other, and then the next host call
// finds out.
TEST(NcclProcessesTest, UnequalCallsAreNamedWithBothSides) {
  struct Case {
    std::function<void(const Caller&)> most, rank_1;
    std::string expected, got;
  };
  const Case cases[] = {
      {[](const Caller& c) { c.gather(8, "h.0"); }, [](const Caller& c) { c.scatter(8, "h.0"); },
       "#1 all_gather f32 x 8 'h.0'", "#1 reduce_scatter f32 x 8 'h.0'"},
      {[](const Caller& c) { c.gather(8, "h.0"); }, [](const Caller& c) { c.gather(9, "h.0"); },
       "#1 all_gather f32 x 8 'h.0'", "#1 all_gather f32 x 9 'h.0'"},
      {[](const Caller& c) { c.gather(8, "h.0"); },
       [](const Caller& c) { c.group.barrier("step"); }, "#1 all_gather f32 x 8 'h.0'",
       "#1 barrier 'step'"},
      {[](const Caller& c) { c.gather(8, "h.0"); }, [](const Caller& c) { c.gather(8, "h.1"); },
       "up to #2 barrier 'end'", "up to #2 barrier 'end'"},
  };
  for (const Case& differing : cases) {
    auto children = joined_all(2, kLong, [&](ProcessGroup& group, const auto&) {
      const Caller c{group, {on_own_gpu(group.rank(), "comm", {})}};
      group.barrier("begin");
      (group.rank() == 1 ? differing.rank_1 : differing.most)(c);
      group.barrier("end");
    });
    for (Child& child : children) {
      EXPECT_THAT(child.hear(),
                  AllOf(HasSubstr(" of world] expected rank 0's"), HasSubstr(differing.expected),
                        HasSubstr(", got rank 1's"), HasSubstr(differing.got)));
      EXPECT_EQ(child.hear(), "left");
    }
  }
}

TEST(NcclProcessesTest, APauseOfOneProcessHoldsForAll) {
  expect_pause_holds_for_all(
      [](milliseconds deadline, const Body& body) { return joined_all(2, deadline, body); });
}

TEST(NcclProcessesTest, WhatCannotJoinIsToldToAll) {
  const auto never = [](ProcessGroup&, const Child::Say& say) { say("joined"); };
  auto others = joined_all(3, kLong, never, [](int process) {
    if (process == 1) cuda_emulation::set_nccl_version(22703);
  });
  for (Child& child : others) {
    EXPECT_THAT(child.hear(), AllOf(StartsWith("[nccl] expected NCCL 2."),
                                    HasSubstr(" in every process, as process 0 has it, got 2.27.3 "
                                              "(process 1)")));
  }
  const Meeting meeting;
  std::vector<Child> on_one_gpu;
  for (int p = 0; p < 2; ++p) {
    on_one_gpu.emplace_back(
        [=](const Child::Say&) { join_nccl(meeting.options(p, 2), 0, {.deadline = kLong}); });
  }
  for (Child& child : on_one_gpu) {
    EXPECT_THAT(child.hear(), AllOf(HasSubstr("invalid usage"), HasSubstr("comm:threads")));
  }
  std::vector<Child> unequal;
  for (int p = 0; p < 2; ++p) {
    unequal.emplace_back([=](const Child::Say&) {
      join_nccl_ranks(meeting.options(p, 2), {.deadline = kLong, .gpus = gpus_of(p, 2 - p)});
    });
  }
  for (Child& child : unequal) {
    EXPECT_THAT(child.hear(), HasSubstr("[join] expected the number of threads of process 0, 2, "
                                        "got 1 (process 1)"));
  }
}

// Threads of processes
// ------------------------------------------------------------------------------------------------

// What both ranks of each process say, and what it says in the end.
void expect_all_hear(std::vector<Child>& children, const ::testing::Matcher<std::string>& what,
                     int lost = -1) {
  for (std::size_t p = 0; p < children.size(); ++p) {
    if (static_cast<int>(p) == lost) continue;
    for (int t = 0; t < 2; ++t) EXPECT_THAT(children[p].hear(), what);
    EXPECT_EQ(children[p].hear(), "left");
  }
}

// Until the others have given up.
void stay_away(ProcessGroup& group) {
  for (;;) {
    group.check();
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(NcclThreadsOfProcessesTest, AProcessThatIsKilledIsNamedByTheOthers) {
  for (const bool notices : {true, false}) {
    for (const int killed : {0, 1}) {
      auto children = pairs_all(3, kLong, sum_for_ever, [=](int) {
        if (!notices) cuda_emulation::ignore_lost_processes();
      });
      for (Child& child : children) {
        for (int t = 0; t < 2; ++t) EXPECT_EQ(child.hear(), "sums");
      }
      children[std::size_t(killed)].end();
      expect_all_hear(children,
                      AllOf(StartsWith("[control] "),
                            HasSubstr("lost process " + std::to_string(killed) + " (")),
                      killed);
    }
  }
}

// Of the world, or of a group whose ranks are in several processes, one in each.
TEST(NcclThreadsOfProcessesTest, AThreadThatReturnsEarlyIsNamedAtOnce) {
  for (const bool of_world : {true, false}) {
    auto children = pairs_all(2, kLong, [=](ProcessGroup& world, const auto& say) {
      const auto across = world.split_by([](int r) { return r % 2; });
      ProcessGroup& group = of_world ? world : *across;
      const Caller c{group, {on_own_gpu(world.rank(), "comm", {})}};
      group.barrier("begin");
      if (world.rank() == 3) return say("returned");
      if (!of_world && world.rank() != 1) stay_away(world);
      c.gather(4, "h.0");
    });
    EXPECT_EQ(children[1].hear(), "returned");
    const std::string expected =
        of_world
            ? "[all_gather #2 of world] expected 4 ranks, got: rank 3 has left the group, last "
              "seen in #1 barrier 'begin' of world; all_gather f32 x 4 'h.0'"
            : "[all_gather #1 of world:1] expected 2 ranks, got: rank 3 has left the group, "
              "last seen in #0 barrier 'begin' of world:1; all_gather f32 x 4 'h.0'";
    for (int t = 0; t < 2; ++t) EXPECT_EQ(children[0].hear(), expected);
    EXPECT_EQ(children[1].hear(), expected);
    for (Child& child : children) EXPECT_EQ(child.hear(), "left");
  }
}

TEST(NcclThreadsOfProcessesTest, AThreadThatIsLateIsNamed) {
  auto children = pairs_all(2, milliseconds(1500), [](ProcessGroup& world, const auto&) {
    const auto across = world.split_by([](int r) { return r % 2; });
    across->barrier("begin");
    if (world.rank() == 3) stay_away(world);
    // What rank 2 calls is not taken for what rank 3 has called.
    across->barrier("end");
    stay_away(world);
  });
  expect_all_hear(children,
                  HasSubstr("[barrier #1 of world:1] expected 2 ranks within 1500 ms, got "
                            "no end of it: rank 3 is missing, last seen in #0 barrier "
                            "'begin' of world:1; barrier 'end' (rank 1 of world:1)"));
}

TEST(NcclThreadsOfProcessesTest, UnequalCallsAreNamedWithBothSides) {
  const auto calls = [](bool differs) {
    return [differs](ProcessGroup& world, const auto&) {
      const Caller c{world, {on_own_gpu(world.rank(), "comm", {})}};
      c.gather(8, "h.0");
      if (!differs) {
        c.gather(8, world.rank() == 3 ? "h.2" : "h.1");  // NCCL takes one for the other
      } else if (world.rank() == 3) {
        c.scatter(8, "h.1");
      } else {
        c.gather(8, "h.1");
      }
      world.barrier("end");
    };
  };
  auto hang = pairs_all(2, kLong, calls(true));
  expect_all_hear(hang, AllOf(HasSubstr("[#1 of world] expected rank "),
                              HasSubstr("#1 all_gather f32 x 8 'h.1', got rank 3's #1 "
                                        "reduce_scatter f32 x 8 'h.1'")));
  // By what they say that they called last, or by the hash of all calls.
  auto end = pairs_all(2, kLong, calls(false));
  expect_all_hear(
      end, AnyOf(HasSubstr("'h.1', got rank 3's #1 all_gather f32 x 8 'h.2'"),
                 HasSubstr("expected rank 0's calls up to #2 barrier 'end', got rank 3's up to")));
}

TEST(NcclThreadsOfProcessesTest, WhatOneThreadFailsWithEndsAll) {
  auto children = pairs_all(2, kLong, [](ProcessGroup& world, const Child::Say& say) {
    world.barrier("begin");
    if (world.rank() == 3) throw std::runtime_error("no more data");
    sum_for_ever(world, say);
  });
  for (int t = 0; t < 2; ++t) EXPECT_EQ(children[0].hear(), "[abort] by rank 3: no more data");
  EXPECT_EQ(children[0].hear(), "left");
  EXPECT_EQ(children[1].hear(), "[abort] by rank 3: no more data");  // rank 2
  EXPECT_EQ(children[1].hear(), "no more data");
}

TEST(NcclThreadsOfProcessesTest, APauseOfOneThreadHoldsForAll) {
  expect_pause_holds_for_all([](milliseconds deadline, const Body& body) {
    return pairs_all(2, deadline, [=](ProcessGroup& world, const Child::Say& say) {
      body(
          world, world.rank() % 2 == 0 ? say : [](const std::string&) {});
    });
  });
}

// The doctor tells groups of one name and members apart by their order in each file.
TEST(NcclThreadsOfProcessesTest, ThreadsRecordTheirCallsInOneGroup) {
  const Meeting meeting;
  Child process([=](const Child::Say& say) {
    const auto flight = std::make_shared<FlightRecorder>();
    run_joined_nccl_ranks(meeting.options(0, 1),
                          {.deadline = kLong, .flight = flight, .gpus = {0, 1}},
                          [](ProcessGroup& world) { world.split(0, 0)->barrier("begin"); });
    const FlightRecording recording = flight->read();
    for (const FlightGroup& group : recording.groups) say(group.name);
    for (const RankFlight& rank : recording.ranks) {
      say(rank.entries.back().label + " " + std::to_string(rank.entries.back().group));
    }
  });
  for (const char* line : {"world", "world:0", "begin 1", "begin 1", "(the end)"}) {
    EXPECT_EQ(process.hear(), line);
  }
}

}  // namespace
}  // namespace tessera::comm
