// Ranks that are real processes, with an emulated GPU each, over the emulated NCCL: the conformance
// suite, and what becomes of the others when one dies, leaves, fails, or calls something else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl.h"
#include "engine/error.h"
#include "tests/comm/control_processes.h"
#include "tests/comm/paused_processes.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_processes.h"
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

INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest,
                         ::testing::Values(Backend{.name = "nccl",
                                                   .run = over_nccl,
                                                   .here = on_own_gpu,
                                                   .beside = on_own_gpu,
                                                   .num_large = 5003,
                                                   // Several of the beats that tell what the others
                                                   // called last: nothing else here does.
                                                   .deadline = milliseconds(3000),
                                                   .sizes = {1, 2, 3}}),
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
}

}  // namespace
}  // namespace tessera::comm
