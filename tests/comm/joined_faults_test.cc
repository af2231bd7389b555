// Processes that comm::join() connects, and what becomes of them when one dies, stops, leaves,
// fails, or cannot join: over Gloo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/join.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "tests/comm/joined_processes.h"
#include "tests/comm/paused_processes.h"
#include "tests/testing/errors.h"
#include "tests/testing/thread_limit.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr milliseconds kLong = std::chrono::hours(1);  // a test that waits for it fails

using Body = std::function<void(ProcessGroup&, const Child::Say&)>;
using Change = std::function<void(JoinOptions&)>;

// Process `process`, which joins, does `body`, leaves, and says "left". What it says besides is of
// `body`, or the error that ended it, which was told once as the world's failure.
Child joined(const MeetingPlace& place, int process, milliseconds deadline, const Body& body,
             const Change& change = {}) {
  return Child([=](const Child::Say& say) {
    JoinOptions options = place.options(process, deadline);
    std::vector<std::string> failures;
    options.on_failure = [&](const std::string& message) { failures.push_back(message); };
    if (change) change(options);
    {
      const auto group = join(options);
      try {
        body(*group, say);
      } catch (const engine::CommError& error) {
        const bool once = failures == std::vector<std::string>{error.what()};
        say((once ? "" : "not told once: ") + std::string(error.what()));
      }
    }
    say("left");
  });
}

std::vector<Child> joined_all(int num_processes, milliseconds deadline, const Body& body) {
  const MeetingPlace place(num_processes);
  std::vector<Child> children;
  for (int p = 0; p < num_processes; ++p) {
    children.push_back(joined(place, p, deadline, body));
  }
  return children;
}

// Sums that never end; says "sums" when the first is there.
void sum_for_ever(ProcessGroup& group, const Child::Say& say) {
  const Stream stream = Stream::inline_cpu("comm");
  const Tensor sum = Tensor::zeros(Memory(), {1 << 20}, DType::kF32, "sum");
  for (int i = 0;; ++i) {
    group.all_reduce(sum, sum, Accumulate::kNo, stream, "sum");
    if (i == 0) say("sums");
  }
}

TEST(JoinedFaultsTest, AProcessThatIsKilledIsNamedByTheOthers) {
  for (int killed = 0; killed < 3; ++killed) {
    auto children = joined_all(3, kLong, sum_for_ever);
    for (Child& child : children) EXPECT_EQ(child.hear(), "sums");
    const std::string name = "lost process " + std::to_string(killed) + " (";
    children[std::size_t(killed)].end();
    for (int p = 0; p < 3; ++p) {
      if (p == killed) continue;
      EXPECT_THAT(children[std::size_t(p)].hear(), AllOf(StartsWith("[control] "), HasSubstr(name)))
          << "process " << p;
      EXPECT_EQ(children[std::size_t(p)].hear(), "left");
    }
  }
}

TEST(JoinedFaultsTest, AProcessThatStopsForLongerThanTheDeadlineIsNamed) {
  for (int stopped = 0; stopped < 3; ++stopped) {
    auto children = joined_all(3, milliseconds(2000), sum_for_ever);
    for (Child& child : children) EXPECT_EQ(child.hear(), "sums");
    children[std::size_t(stopped)].signal(SIGSTOP);
    const std::string number = std::to_string(stopped);
    for (int p = 0; p < 3; ++p) {
      if (p == stopped) continue;
      EXPECT_THAT(children[std::size_t(p)].hear(),
                  AnyOf(HasSubstr("lost process " + number + " ("),
                        HasSubstr("rank " + number + " is missing")));
    }
    children[std::size_t(stopped)].signal(SIGCONT);
    EXPECT_THAT(children[std::size_t(stopped)].hear(), HasSubstr("expected"));
    EXPECT_EQ(children[std::size_t(stopped)].hear(), "left");
  }
}

// Process 0 is told only when the one that has stopped had its time to take the news.
TEST(JoinedFaultsTest, AProcessThatIsKilledWhileAnotherHasStoppedIsNamed) {
  std::vector<std::vector<Child>> jobs;
  for (int i = 0; i < 8; ++i) jobs.push_back(joined_all(3, kLong, sum_for_ever));
  for (auto& children : jobs) {
    for (Child& child : children) EXPECT_EQ(child.hear(), "sums");
    children[2].signal(SIGSTOP);
    children[1].end();
  }
  for (auto& children : jobs) {
    for (const std::size_t p : {0, 2}) {
      if (p == 2) children[p].signal(SIGCONT);
      EXPECT_THAT(children[p].hear(),
                  AllOf(StartsWith("[control] "), HasSubstr("lost process 1 (")))
          << "process " << p;
    }
  }
}

TEST(JoinedFaultsTest, AProcessThatStopsForAWhileIsWaitedFor) {
  auto children = joined_all(3, std::chrono::minutes(1), [](ProcessGroup& group, const auto& say) {
    group.barrier("begin");
    say("begun");
    for (int i = 0; i < 10; ++i) {
      std::this_thread::sleep_for(milliseconds(20));
      group.barrier("go on");
    }
    say("ended");
  });
  for (Child& child : children) EXPECT_EQ(child.hear(), "begun");
  children[1].signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(1500));
  children[1].signal(SIGCONT);
  for (Child& child : children) {
    EXPECT_EQ(child.hear(), "ended");
    EXPECT_EQ(child.hear(), "left");
  }
}

TEST(JoinedFaultsTest, AProcessThatReturnsEarlyIsNamedAtOnce) {
  for (int early = 0; early < 3; ++early) {
    auto children = joined_all(3, kLong, [early](ProcessGroup& group, const auto&) {
      group.barrier("begin");
      if (group.rank() != early) group.barrier("end");
    });
    EXPECT_EQ(children[std::size_t(early)].hear(), "left");
    for (int p = 0; p < 3; ++p) {
      if (p == early) continue;
      EXPECT_EQ(children[std::size_t(p)].hear(),
                "[barrier #1 of world] expected 3 ranks, got: rank " + std::to_string(early) +
                    " has left the group, last seen in #0 barrier 'begin'; barrier 'end'");
      EXPECT_EQ(children[std::size_t(p)].hear(), "left");
    }
  }
}

TEST(JoinedFaultsTest, AProcessThatExitsWithoutLeavingIsNamedAtOnce) {
  for (int gone = 0; gone < 3; ++gone) {
    auto children = joined_all(3, kLong, [gone](ProcessGroup& group, const auto&) {
      group.barrier("begin");
      if (group.rank() == gone) ::_exit(0);
      group.barrier("end");
    });
    for (int p = 0; p < 3; ++p) {
      if (p == gone) continue;
      EXPECT_THAT(children[std::size_t(p)].hear(),
                  AllOf(StartsWith("[control] expected 3 processes, lost process " +
                                   std::to_string(gone) + " ("),
                        HasSubstr("which ended without a word; ")));
    }
  }
}

// Another one, which the rank that waits first has to wait for as well, is not to hide it.
TEST(JoinedFaultsTest, AProcessThatReturnsEarlyIsNamedWhileAnotherIsLate) {
  auto children = joined_all(3, kLong, [](ProcessGroup& group, const auto& say) {
    group.barrier("begin");
    if (group.rank() == 0) group.barrier("end");
    if (group.rank() == 1) {
      try {
        for (;; std::this_thread::sleep_for(milliseconds(1))) group.check();
      } catch (const engine::CommError&) {
        say("late, not gone");
        throw;
      }
    }
  });
  const std::string error =
      "[barrier #1 of world] expected 3 ranks, got: rank 2 has left the group, last seen in #0 "
      "barrier 'begin'; barrier 'end'";
  EXPECT_EQ(children[0].hear(), error);
  EXPECT_EQ(children[1].hear(), "late, not gone");
  EXPECT_EQ(children[1].hear(), error);
}

// The root, which sends all, is the first to be done.
TEST(JoinedFaultsTest, AProcessMayLeaveAsSoonAsItsCallsAreDone) {
  for (int i = 0; i < 10; ++i) {
    auto children = joined_all(3, kLong, [](ProcessGroup& group, const auto& say) {
      const Tensor last = Tensor::zeros(Memory(), {1 << 20}, DType::kF32, "last");
      if (group.rank() == 0) std::ranges::fill(std::span(last.data<float>(), 1 << 20), 1.0f);
      if (group.rank() == 2) std::this_thread::sleep_for(milliseconds(30));
      group.broadcast(last, 0, Stream::inline_cpu("comm"), "last");
      const auto sum = std::accumulate(last.data<float>(), last.data<float>() + (1 << 20), 0.0);
      say(std::to_string(static_cast<int>(sum)));
    });
    for (Child& child : children) {
      EXPECT_EQ(child.hear(), "1048576");
      EXPECT_EQ(child.hear(), "left");
    }
  }
}

TEST(JoinedFaultsTest, WhatOneProcessFailsWithEndsAll) {
  for (int failing = 0; failing < 3; ++failing) {
    auto children = joined_all(3, kLong, [failing](ProcessGroup& group, const auto& say) {
      group.barrier("begin");
      if (group.rank() == failing) group.abort("the loader died");
      sum_for_ever(group, say);
    });
    for (Child& child : children) {
      EXPECT_EQ(child.hear(), "[abort] by rank " + std::to_string(failing) + ": the loader died");
      EXPECT_EQ(child.hear(), "left");
    }
  }
}

TEST(JoinedFaultsTest, APauseOfOneProcessHoldsForAll) {
  expect_pause_holds_for_all(
      [](milliseconds deadline, const Body& body) { return joined_all(3, deadline, body); });
}

void never(ProcessGroup&, const Child::Say& say) { say("joined"); }

TEST(JoinedFaultsTest, ProcessesWithOtherTransportsDoNotJoin) {
  const MeetingPlace place(3);
  std::vector<Child> children;
  for (int p = 0; p < 3; ++p) {
    children.push_back(joined(place, p, kLong, never, [p](JoinOptions& options) {
      options.transport_name = p == 1 ? "mpi" : "gloo";
    }));
  }
  for (Child& child : children) {
    EXPECT_EQ(child.hear(),
              "[join] expected the transport of process 0, gloo, got mpi (process 1)");
    EXPECT_EQ(child.hear(), "(the end)");
  }
}

TEST(JoinedFaultsTest, WhatKeepsOneFromJoiningIsToldToAll) {
  for (int failing = 0; failing < 3; ++failing) {
    const MeetingPlace place(3);
    std::vector<Child> children;
    for (int p = 0; p < 3; ++p) {
      children.push_back(joined(place, p, kLong, never, [=](JoinOptions& options) {
        if (p != failing) return;
        options.transport = [](const auto&) -> std::unique_ptr<Transport> {
          throw std::bad_alloc();
        };
      }));
    }
    for (int p = 0; p < 3; ++p) {
      EXPECT_THAT(children[std::size_t(p)].hear(),
                  p == failing ? "std::bad_alloc"
                               : "[join] process " + std::to_string(failing) + ": std::bad_alloc");
    }
  }
}

// Of three processes, of which one does `last` when each has heard how to connect to it.
std::vector<Child> joined_but_one(int one, const std::function<void()>& last) {
  const MeetingPlace place(3);
  std::vector<Child> children;
  for (int p = 0; p < 3; ++p) {
    children.push_back(joined(place, p, kLong, never, [=](JoinOptions& options) {
      if (p != one) return;
      options.transport = [last, make = options.transport](const AllGatherTexts& all_gather) {
        return make([&](std::string own) {
          auto texts = all_gather(std::move(own));
          last();
          return texts;
        });
      };
    }));
  }
  return children;
}

TEST(JoinedFaultsTest, WhatOneFailsWithWhileTheyConnectEndsTheOthersAtOnce) {
  for (int failing = 0; failing < 3; ++failing) {
    auto children = joined_but_one(failing, [] { throw std::bad_alloc(); });
    for (int p = 0; p < 3; ++p) {
      EXPECT_THAT(children[std::size_t(p)].hear(),
                  p == failing ? "std::bad_alloc"
                               : "[join] process " + std::to_string(failing) + ": std::bad_alloc");
    }
  }
}

TEST(JoinedFaultsTest, OneThatStopsAndIsKilledWhileTheyConnectIsNamed) {
  for (int killed = 0; killed < 3; ++killed) {
    auto children = joined_but_one(killed, [] { ::raise(SIGSTOP); });
    int status = 0;
    const auto k = std::size_t(killed);
    EXPECT_EQ(::waitpid(children[k].pid(), &status, WUNTRACED), children[k].pid());
    std::this_thread::sleep_for(milliseconds(100));
    children[k].end();
    for (int p = 0; p < 3; ++p) {
      if (p == killed) continue;
      EXPECT_THAT(children[std::size_t(p)].hear(),
                  AllOf(StartsWith("[control] expected 3 processes, lost process " +
                                   std::to_string(killed) + " ("),
                        HasSubstr("which ended without a word; ")));
    }
  }
}

TEST(JoinedFaultsTest, AProcessThatCannotStartThreadsDoesNotHoldUpTheOthers) {
  const auto take_threads = [](JoinOptions&) { testing::allow_threads(0); };
  for (const int poor : {0, 1}) {
    const MeetingPlace place(2);
    Child rich = joined(place, 1 - poor, milliseconds(2000), never);
    Child other = joined(place, poor, milliseconds(2000), never, take_threads);
    EXPECT_THAT(other.hear(), HasSubstr("[join] expected to start a thread, got "));
    EXPECT_THAT(rich.hear(), poor == 0
                                 ? HasSubstr("expected process 0 of job 'job' at tcp:127.0.0.1:")
                                 : HasSubstr("process 1"));
    EXPECT_EQ(rich.hear(), "(the end)");
  }
}

TEST(JoinedFaultsTest, AProcessThatHasNoThreadForItsRankEndsTheOthersWithThatReason) {
  for (const int poor : {0, 1}) {
    const MeetingPlace place(2);
    std::vector<Child> children;
    for (int p = 0; p < 2; ++p) {
      children.emplace_back([&place, is_poor = p == poor, p](const Child::Say&) {
        JoinOptions options = place.options(p, kLong);
        options.transport = [make = options.transport, is_poor](const AllGatherTexts& all_gather) {
          auto transport = make(all_gather);
          if (is_poor) testing::allow_threads(1);  // for what carries failures
          return transport;
        };
        run_joined_ranks(1, options, [](ProcessGroup& group) { group.barrier("begin"); });
      });
    }
    EXPECT_THAT(children[std::size_t(poor)].hear(),
                HasSubstr("[threads] expected to start 1 threads, got "));
    EXPECT_EQ(children[std::size_t(1 - poor)].hear(),
              "[abort] by the main thread: a thread that does not start");
  }
}

TEST(JoinedFaultsTest, WhomCallsWaitForIsKnown) {
  constexpr int kNumCalls = 10;
  const MeetingPlace place(3);
  std::vector<Child> children;
  for (int p = 0; p < 3; ++p) {
    children.emplace_back([=](const Child::Say& say) {
      JoinOptions options = place.options(p, kLong);
      options.flight = std::make_shared<FlightRecorder>();
      const auto group = join(options);
      group->barrier("begun");
      const FlightWaits before = options.flight->waits();
      for (int i = 0; i < kNumCalls; ++i) {
        if (p == 2) std::this_thread::sleep_for(milliseconds(50));
        group->barrier("late");
      }
      const FlightWaits waits = options.flight->waits();
      say(std::to_string(waits.num_calls - before.num_calls));
      const auto waited_for = [&](std::size_t r) {
        return waits.by_rank[r].waited_ns - before.by_rank[r].waited_ns;
      };
      const std::int64_t others = waited_for(0) + waited_for(1);
      say(waited_for(2) > others && waits.by_rank[2].num_calls > kNumCalls / 2 ? "it was 2"
                                                                               : "it was another");
      group->barrier("end");
    });
  }
  for (std::size_t p = 0; p < 3; ++p) {
    EXPECT_EQ(children[p].hear(), std::to_string(kNumCalls));
    EXPECT_EQ(children[p].hear(), p == 2 ? "it was another" : "it was 2");
  }
}

TEST(JoinedFaultsTest, WhichRankOfAProcessCallsWaitForIsKnown) {
  constexpr int kNumCalls = 10, kLate = 3;
  const MeetingPlace place(2);
  std::vector<Child> children;
  for (int p = 0; p < 2; ++p) {
    children.emplace_back([=](const Child::Say& say) {
      JoinOptions options = place.options(p, kLong);
      options.flight = std::make_shared<FlightRecorder>();
      run_joined_ranks(2, options, [](ProcessGroup& world) {
        const auto stream = engine::Stream::inline_cpu("compute");
        const engine::Tensor one = Tensor::zeros(Memory(), {1}, DType::kF32, "one");
        for (int i = 0; i < kNumCalls; ++i) {
          if (world.rank() == kLate) std::this_thread::sleep_for(milliseconds(50));
          world.broadcast(one, 0, stream, "late");
        }
      });
      const auto waits = options.flight->waits().by_rank;
      const auto most = std::ranges::max_element(waits, {}, &FlightWaits::Wait::waited_ns);
      say(std::to_string(most - waits.begin()));
    });
  }
  for (Child& child : children) EXPECT_EQ(child.hear(), std::to_string(kLate));
}

TEST(JoinedFaultsTest, OneProcessIsProcessZero) {
  JoinOptions options = MeetingPlace(1).options(0, kLong);
  EXPECT_EQ(join(options)->size(), 1);
  options.control.process = 1;
  EXPECT_THAT(testing::error_of<engine::InvalidArgument>([&] { join(options); }),
              HasSubstr("[join] expected process 0 of 1, got 1"));
}

}  // namespace
}  // namespace tessera::comm
