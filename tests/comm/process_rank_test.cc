// Ranks of processes: what becomes of calls that differ and of ranks that are missing. Each rank is
// a thread here, with a world of its own; what it knows of the others stands on a board.
#include "comm/processes/process_rank.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::comm {
namespace {

using engine::CommError;
using engine::Stream;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

using Bytes = std::vector<std::byte>;

constexpr milliseconds kLong = std::chrono::hours(1);  // a test that waits for it fails

// What ranks have given, by the number of the exchange and the rank.
struct Board {
  std::mutex mutex;
  std::map<int, std::map<int, Bytes>> given;
  std::map<int, std::string> calls;  // by rank of the world: what it called last
  std::set<int> left;                // as ranks of the world
};

// Unless it `hears`, a rank knows of the others only what an exchange tells.
Peers peers_of(Board& board, int world_rank, bool hears) {
  return {.has_left =
              [&board, hears](int rank) {
                const std::lock_guard lock(board.mutex);
                return hears && board.left.contains(rank);
              },
          .say_call =
              [&board, world_rank](std::string_view call) {
                const std::lock_guard lock(board.mutex);
                board.calls[world_rank] = call;
              },
          .last_call =
              [&board, hears](int rank) {
                const std::lock_guard lock(board.mutex);
                return hears ? board.calls[rank] : "";
              }};
}

class FakeExchange final : public Exchange {
 public:
  FakeExchange(Board& board, int rank, int size) : board_(board), rank_(rank), size_(size) {}

  void begin(std::span<const std::byte> own, const Stream* /*stream*/) override {
    const std::lock_guard lock(board_.mutex);
    board_.given[++number_][rank_] = {own.begin(), own.end()};
    all_.clear();
  }
  std::span<const std::byte> answers() override {
    const std::lock_guard lock(board_.mutex);
    const auto& given = board_.given[number_];
    if (all_.empty() && static_cast<int>(given.size()) == size_) {
      for (const auto& [rank, bytes] : given) all_.insert(all_.end(), bytes.begin(), bytes.end());
    }
    return all_;
  }
  void release() noexcept override { ++num_released; }

  int num_released = 0;

 private:
  Board& board_;
  const int rank_, size_;
  int number_ = 0;
  Bytes all_;
};

struct Options {
  milliseconds deadline = kLong;
  bool hears = true;  // of others' calls and ends, before an exchange tells
  std::shared_ptr<FlightRecorder> flight = {};
};

// A rank as its thread sees it.
struct Self {
  ProcessRank& rank;
  World& world;
  const Stream stream = Stream::inline_cpu("comm");

  void gather(const std::string& label) const {
    rank.announce({.op = "all_gather", .label = label}, "all_gather '" + label + "'");
  }
};

// What each rank's `fn` ends with. They are ranks 10, 11, ... of the world.
std::vector<std::string> run(int size, const Options& options,
                             const std::function<void(const Self&)>& fn) {
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 10);
  std::vector<std::string> results(static_cast<std::size_t>(size), "no error");
  Board board;
  std::vector<std::jthread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      const auto world =
          std::make_shared<World>(options.deadline, nullptr, r == 0 ? options.flight : nullptr);
      FakeExchange exchange(board, r, size);
      const int world_rank = members[static_cast<std::size_t>(r)];
      ProcessRank rank(world, peers_of(board, world_rank, options.hears), "group", members, r,
                       exchange);
      std::string& result = results[static_cast<std::size_t>(r)];
      try {
        fn({rank, *world});
      } catch (const CommError& error) {
        result = error.what();
      }
      EXPECT_EQ(exchange.num_released, result == "no error" ? 0 : 1);
      const std::lock_guard lock(board.mutex);
      board.left.insert(world_rank);
    });
  }
  threads.clear();
  return results;
}

TEST(ProcessRankTest, RanksThatCallTheSameFindNoDifference) {
  const auto results = run(3, {}, [](const Self& self) {
    for (int step = 0; step < 3; ++step) {
      self.rank.declare("a step");
      self.gather("h.0");
      self.rank.agree(self.stream);
      self.rank.check();
    }
    self.rank.barrier("end");
  });
  EXPECT_THAT(results, Each("no error"));
}

TEST(ProcessRankTest, ARankThatCallsAnotherCollectiveIsNamedWithBothSides) {
  for (const bool in_barrier : {true, false}) {
    const auto results = run(3, {.hears = false}, [&](const Self& self) {
      self.gather("h.0");
      self.gather(self.rank.rank() == 2 ? "h.2" : "h.1");
      if (in_barrier) {
        self.rank.barrier("step");
      } else {
        self.rank.agree(self.stream);
        self.rank.agree(self.stream);  // waits for the first
      }
    });
    EXPECT_THAT(
        results,
        Each(AllOf(HasSubstr(in_barrier ? "[barrier #2 of group]" : "[agree #2 of group]"),
                   HasSubstr("expected rank 10's calls up to"), HasSubstr("got rank 12's up to"))));
    if (in_barrier) continue;
    EXPECT_THAT(results, Each(AllOf(HasSubstr("up to #1 all_gather 'h.1', got"),
                                    HasSubstr("up to #1 all_gather 'h.2'"))));
  }
}

TEST(ProcessRankTest, ADifferenceBeforeTheLastCallIsFound) {
  const auto results = run(2, {.hears = false}, [](const Self& self) {
    self.rank.declare(self.rank.rank() == 0 ? "lr 0.1" : "lr 0.2");
    self.rank.barrier("end");
  });
  EXPECT_THAT(results, Each(HasSubstr("expected rank 10's calls up to #1 barrier 'end', got rank "
                                      "11's up to #1 barrier 'end'")));
}

TEST(ProcessRankTest, ACallMoreIsADifference) {
  const auto results = run(2, {.hears = false}, [](const Self& self) {
    for (int i = 0; i <= self.rank.rank(); ++i) self.gather("h.0");
    self.rank.barrier("end");
  });
  EXPECT_THAT(results, Each(AllOf(HasSubstr("rank 10's calls up to #1 barrier 'end'"),
                                  HasSubstr("rank 11's up to #2 barrier 'end'"))));
}

TEST(ProcessRankTest, AMissingRankIsNamedByTheDeadline) {
  std::atomic<int> num_waiting = 2;
  const auto results = run(4, {.deadline = milliseconds(50)}, [&](const Self& self) {
    self.gather("h.0");
    if (self.rank.rank() % 2 != 0) {
      while (num_waiting > 0) std::this_thread::yield();
      return;
    }
    try {
      self.rank.barrier("step");
    } catch (const CommError&) {
      --num_waiting;
      throw;
    }
  });
  EXPECT_THAT((std::vector<std::string>{results[1], results[3]}), Each("no error"));
  EXPECT_EQ(results[2],
            "[barrier #1 of group] expected 4 ranks within 50 ms, got no end of it: ranks 11, 13 "
            "are missing, last seen in #0 all_gather 'h.0' of group; barrier 'step' (rank 12 of "
            "group)");
}

TEST(ProcessRankTest, ARankThatHasLeftWithoutTheCallIsNamedAtOnce) {
  const auto results = run(3, {}, [](const Self& self) {
    self.gather("h.0");
    self.rank.barrier("begin");
    if (self.rank.rank() != 1) self.rank.barrier("end");
  });
  EXPECT_EQ(results[1], "no error");
  EXPECT_THAT(
      (std::vector<std::string>{results[0], results[2]}),
      Each("[barrier #2 of group] expected 3 ranks, got: rank 11 has left the group, last seen in "
           "#1 barrier 'begin' of group; barrier 'end'"));
}

// Though NCCL would wait for ever, or mix up what both move.
TEST(ProcessRankTest, ARankThatCallsSomethingElseIsNamedByWhatItSays) {
  for (const int num_more : {0, 5}) {
    std::atomic<int> num_said = 0;
    const auto results = run(2, {}, [&](const Self& self) {
      self.gather("h.0");
      const bool differs = self.rank.rank() == 1;
      const Call call = self.rank.announce({.op = "x"}, differs ? "gather 'h.2'" : "gather 'h.1'");
      for (int i = 0; i < num_more && !differs; ++i) self.gather("more");  // enqueued ahead
      ++num_said;
      while (num_said < 2) std::this_thread::yield();
      EXPECT_TRUE(self.rank.watch(call, false) || differs);
      ++num_said;
      while (num_said < 4) std::this_thread::yield();
      if (differs && num_more > 0) return;
      EXPECT_EQ(error_of<CommError>([&] { self.world.check(); }),
                "[#1 of group] expected rank 10's #1 gather 'h.1', got rank 11's #1 gather 'h.2'");
    });
    EXPECT_THAT(results, Each("no error"));
  }
}

// It ends there before it ends here.
TEST(ProcessRankTest, ARankMayLeaveAfterTheCall) {
  std::atomic<bool> watched = false;
  const auto results = run(2, {}, [&](const Self& self) {
    const Call call = self.rank.announce({.op = "all_gather"}, "all_gather 'h.0'");
    if (self.rank.rank() == 1) return;
    std::this_thread::sleep_for(milliseconds(20));
    watched = !self.rank.watch(call, false);
  });
  EXPECT_TRUE(watched);
  EXPECT_THAT(results, Each("no error"));
}

TEST(ProcessRankTest, ACallThatIsLateFailsTheWorld) {
  run(1, {.deadline = milliseconds(50)}, [](const Self& self) {
    const Call call = self.rank.announce({.op = "all_gather"}, "all_gather 'h.0'");
    EXPECT_FALSE(self.rank.watch(call, false));
    EXPECT_FALSE(self.world.has_failed());
    EXPECT_TRUE(self.rank.watch(call, true));
    EXPECT_EQ(error_of<CommError>([&] { self.world.check(); }),
              "[all_gather #0 of group] expected 1 ranks within 50 ms, got no end of it: all have "
              "called it; all_gather 'h.0' (rank 10 of group)");
  });
}

TEST(ProcessRankTest, WhoeverAgreesWaitsForNobody) {
  std::atomic<bool> checked = false;
  const auto results = run(2, {.hears = false}, [&](const Self& self) {
    if (self.rank.rank() == 1) {
      while (!checked) std::this_thread::yield();
      self.gather("late");
    }
    self.rank.agree(self.stream);
    if (self.rank.rank() == 0) {
      self.rank.check();  // rank 1 has not come
      checked = true;
    }
    self.rank.barrier("end");
  });
  EXPECT_THAT(results, Each(HasSubstr("[agree #")));
}

TEST(ProcessRankTest, AWorldThatFailsMeanwhileEndsTheWait) {
  World* waiting = nullptr;
  std::atomic<bool> waits = false;
  std::string caught;
  run(2, {}, [&](const Self& self) {
    if (self.rank.rank() == 1) {
      while (!waits) std::this_thread::yield();
      waiting->abort_by(10, "enough");
      while (waits) std::this_thread::yield();  // the world lives until then
      return;
    }
    waiting = &self.world;
    waits = true;
    try {
      self.rank.barrier("end");
    } catch (const CommError& error) {
      caught = error.what();
    }
    waits = false;
  });
  EXPECT_EQ(caught, "[abort] by rank 10: enough");
}

TEST(ProcessRankTest, PartsAreOrderedByKeyAndHearTheirFirstRank) {
  const auto results = run(5, {}, [](const Self& self) {
    const int rank = self.rank.rank();
    const auto part = self.rank.split(rank % 2, -rank, [&] { return Bytes{std::byte(rank)}; });
    EXPECT_EQ(part.name, rank % 2 == 0 ? "group:0" : "group:1");
    EXPECT_EQ(part.members,
              rank % 2 == 0 ? (std::vector<int>{14, 12, 10}) : (std::vector<int>{13, 11}));
    EXPECT_EQ(part.members[static_cast<std::size_t>(part.rank)], 10 + rank);
    EXPECT_EQ(part.message.at(0), std::byte(rank % 2 == 0 ? 4 : 3));
    self.rank.barrier("end");
  });
  EXPECT_THAT(results, Each("no error"));
}

TEST(ProcessRankTest, CallsAreRecorded) {
  const auto flight = std::make_shared<FlightRecorder>();
  run(2, {.flight = flight}, [](const Self& self) {
    self.rank.declare("a step");
    self.rank.agree(self.stream);
    self.rank.barrier("end");
    self.gather("h.0");  // its end is for whoever moves the tensors to record
  });
  const FlightRecording recording = flight->read();
  ASSERT_EQ(recording.groups.size(), 1u);
  EXPECT_EQ(recording.groups[0].members, (std::vector<int>{10, 11}));
  ASSERT_EQ(recording.ranks.size(), 1u);
  EXPECT_EQ(recording.ranks[0].rank, 10);
  std::vector<std::string> calls;
  for (const FlightEntry& entry : recording.ranks[0].entries) {
    calls.push_back(entry.op + " " + entry.label + " " + std::string(name_of(entry.state)));
  }
  EXPECT_THAT(calls, ElementsAre("declare a step finished", "agree  finished",
                                 "barrier end finished", "all_gather h.0 called"));
}

}  // namespace
}  // namespace tessera::comm
