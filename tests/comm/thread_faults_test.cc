// Ranks as threads of which one goes wrong, in every way that one can: all end at once with an
// error that names both sides, and nothing of the world is left: no thread, no open file, no
// memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
#include "tests/testing/leftovers.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::Holdings;
using testing::holdings;
using testing::holdings_settled;

constexpr int kRanks = 4;
constexpr int kBad = 2;  // the rank that goes wrong

// What a rank calls. Each call is waited for in the stream, and at the end.
struct Caller {
  ProcessGroup& world;
  Memory memory{};
  Stream stream = Stream::worker_cpu("comm");

  bool is_bad() const { return world.rank() == kBad; }
  Tensor make(std::int64_t numel, DType dtype = DType::kF32) const {
    return Tensor::zeros(memory, {numel}, dtype, "t");
  }
  void gather(std::string_view label, std::int64_t n = 8, DType dtype = DType::kF32) const {
    world.all_gather(make(n, dtype), make(n * world.size(), dtype), stream, label);
  }
  void scatter(std::string_view label, std::int64_t n = 8,
               Accumulate accumulate = Accumulate::kNo) const {
    world.reduce_scatter(make(n * world.size()), make(n), accumulate, stream, label);
  }
  void broadcast(int root) const { world.broadcast(make(4), root, stream, "w"); }
};

struct Fault {
  const char* name;
  std::function<void(const Caller&)> run;         // between one good call and another
  std::vector<std::string> told;                  // to every rank
  milliseconds deadline = std::chrono::hours(1);  // waiting for it fails the test
  std::vector<std::string> told_bad = {};         // to the bad rank, where it is told other things
};

std::vector<Fault> faults() {
  return {
      {"an extra call",
       [](const Caller& c) {
         if (c.is_bad()) c.gather("extra");
         c.scatter("h.1");
       },
       {"rank 2's all_gather f32 x 8 'extra'", "reduce_scatter f32 x 8 'h.1'"}},
      {"a missing call",
       [](const Caller& c) {
         if (!c.is_bad()) c.gather("h.1");
         c.scatter("h.1");
       },
       {"rank 2's reduce_scatter f32 x 8 'h.1'", "all_gather f32 x 8 'h.1'"}},
      {"two calls of one size in the other order",
       [](const Caller& c) {
         c.gather(c.is_bad() ? "h.2" : "h.1");
         c.gather(c.is_bad() ? "h.1" : "h.2");
       },
       {"rank 2's all_gather f32 x 8 'h.2'", "all_gather f32 x 8 'h.1'"}},
      {"another op",
       [](const Caller& c) { c.is_bad() ? c.scatter("h.1") : c.gather("h.1"); },
       {"rank 2's reduce_scatter", "all_gather"}},
      {"another dtype of as many bytes",
       [](const Caller& c) { c.gather("h.1", 8, c.is_bad() ? DType::kI32 : DType::kF32); },
       {"rank 2's all_gather i32 x 8", "all_gather f32 x 8"}},
      {"half as many elements",
       [](const Caller& c) { c.gather("h.1", c.is_bad() ? 10 : 20); },
       {"rank 2's all_gather f32 x 10", "all_gather f32 x 20"}},
      {"half as many elements of a big tensor",
       [](const Caller& c) { c.gather("h.1", c.is_bad() ? 1 << 15 : 1 << 16); },
       {"rank 2's all_gather f32 x 32768", "all_gather f32 x 65536"}},
      {"no elements",
       [](const Caller& c) { c.gather("h.1", c.is_bad() ? 0 : 8); },
       {"rank 2's all_gather f32 x 0", "all_gather f32 x 8"}},
      {"another reduction",
       [](const Caller& c) {
         c.scatter("h.1", 8, c.is_bad() ? Accumulate::kYes : Accumulate::kNo);
       },
       {"rank 2's reduce_scatter f32 x 8 onto a sum 'h.1'", "reduce_scatter f32 x 8 'h.1'"}},
      {"another root",
       [](const Caller& c) { c.broadcast(c.is_bad() ? 1 : 0); },
       {"rank 2's broadcast f32 x 4 from rank 1", "broadcast f32 x 4 from rank 0"}},
      {"an error",
       [](const Caller& c) {
         if (c.is_bad()) throw std::runtime_error("the data is bad");
         c.gather("h.1");
       },
       {"[abort] by rank 2: the data is bad"},
       std::chrono::hours(1),
       {"the data is bad"}},
      {"an error in the thread of a stream",
       [](const Caller& c) {
         if (c.is_bad()) {
           c.stream.launch({.name = "bad"}, [] { throw std::runtime_error("the copy failed"); });
         }
         c.gather("h.1");
       },
       {"[abort] by rank 2: the copy failed"},
       std::chrono::hours(1),
       {"the copy failed"}},
      {"a part of the world that is left before its first call",
       [](const Caller& c) {
         const auto part = c.world.split(0, 0);
         if (!c.is_bad()) part->barrier("first");
       },
       {"[barrier #0 of world:0]", "rank 2 has left the group"},
       std::chrono::hours(1),
       {"rank 2 has left the group"}},
      {"a sleep past the deadline",
       [](const Caller& c) {
         if (c.is_bad()) std::this_thread::sleep_for(milliseconds(500));
         c.gather("h.1");
       },
       {"within 100 ms", "rank 2 is missing, last seen in #0 all_gather f32 x 8 'h.0'"},
       milliseconds(100)},
  };
}

// What each rank ends with; by rank.
std::vector<std::string> outcome_of(const std::function<void(const Caller&)>& fn,
                                    milliseconds deadline) {
  std::vector<std::string> messages(kRanks, "no error");
  try {
    run_ranks(kRanks, {.deadline = deadline}, [&](ProcessGroup& world) {
      try {
        const Caller caller{world};
        caller.gather("h.0");
        caller.stream.synchronize();
        fn(caller);
        caller.gather("h.3");
        caller.stream.synchronize();
      } catch (const std::exception& error) {
        messages[static_cast<std::size_t>(world.rank())] = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {  // one of the messages
  }
  return messages;
}

TEST(ThreadFaults, EveryRankIsToldBothSidesAndNothingIsLeft) {
  for (const Fault& fault : faults()) {
    SCOPED_TRACE(fault.name);
    // The first time may fill what the process keeps.
    Holdings before, after;
    for (int i = 0; i < 2; ++i) {
      before = holdings();
      outcome_of(fault.run, fault.deadline);
      after = holdings_settled(before);
    }
    EXPECT_EQ(after, before);

    const auto begin = std::chrono::steady_clock::now();
    const std::vector<std::string> messages = outcome_of(fault.run, fault.deadline);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    for (int r = 0; r < kRanks; ++r) {
      const bool other = r == kBad && !fault.told_bad.empty();
      for (const std::string& part : other ? fault.told_bad : fault.told) {
        EXPECT_THAT(messages[static_cast<std::size_t>(r)], HasSubstr(part)) << "rank " << r;
      }
    }
  }
}

// The label is all that tells two calls of one size apart: without it nobody would notice.
TEST(ThreadFaults, CallsWithoutLabelsCanBeSwappedUnseen) {
  EXPECT_THAT(
      outcome_of([](const Caller& c) { c.gather(""), c.gather(""); }, std::chrono::hours(1)),
      Each("no error"));
}

// And what is left behind is counted.
TEST(ThreadFaults, WhatStaysIsFound) {
  const Holdings before = holdings();
  {
    const Stream stays = Stream::worker_cpu("stays");
    EXPECT_EQ(holdings().num_threads, before.num_threads + 1);
    EXPECT_GT(holdings().num_allocations, before.num_allocations);
  }
  EXPECT_EQ(holdings_settled(before), before);
}

TEST(ThreadFaults, GroupsThatAreDestroyedWithCallsInFlightEndInAnyOrder) {
  for (int round = 0; round < 20; ++round) {
    run_ranks(kRanks, {.deadline = std::chrono::hours(1)}, [&](ProcessGroup& world) {
      const Caller caller{world};
      auto first = world.split(0, 0), second = world.split(world.rank() % 2, 0);
      for (int i = 0; i < 10; ++i) {
        const Tensor t = caller.make(4);
        first->all_reduce(t, t, Accumulate::kNo, caller.stream, "first");
        second->all_reduce(t, t, Accumulate::kNo, caller.stream, "second");
      }
      if ((world.rank() + round) % 2 == 0) {
        first.reset();
        second.reset();
      } else {
        second.reset();
        first.reset();
      }
    });
  }
}

TEST(ThreadFaults, AThreadThatIsNoRankMayAbortAsOftenAsItLikes) {
  for (int round = 0; round < 20; ++round) {
    auto groups = make_threads_world(2, {.deadline = std::chrono::hours(1)});
    std::vector<std::string> messages(2);
    std::vector<std::jthread> ranks;
    for (std::size_t r = 0; r < 2; ++r) {
      ranks.emplace_back([&, r] {
        const Caller caller{*groups[r]};
        try {
          for (;;) {
            caller.gather("h.0");
            caller.stream.synchronize();
          }
        } catch (const CommError& error) {
          messages[r] = error.what();
        }
      });
    }
    std::this_thread::sleep_for(milliseconds(1));
    for (const char* reason : {"first", "second"}) groups[0]->abort(reason);
    ranks.clear();
    EXPECT_THAT(messages, Each("[abort] by rank 0: first"));
    groups[0]->abort("third");
    groups.clear();
  }
}

}  // namespace
}  // namespace tessera::comm
