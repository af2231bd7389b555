// Meetings of thread ranks: what becomes of work that fails, and of calls that nobody waits for.
#include "comm/threads/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr milliseconds kLong = std::chrono::hours(1);  // a test that waits for it fails

std::shared_ptr<Rendezvous> make_group(int size, milliseconds deadline = kLong) {
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 10);  // not the ranks of the group
  return std::make_shared<Rendezvous>(std::make_shared<World>(deadline), "group", members);
}

// What each rank's call ends with.
std::vector<std::string> on_threads(int size, const std::function<void(int rank)>& fn) {
  std::vector<std::string> results(static_cast<std::size_t>(size), "no error");
  std::vector<std::jthread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        fn(r);
      } catch (const std::bad_alloc&) {
        results[static_cast<std::size_t>(r)] = "bad_alloc";
      } catch (const CommError& error) {
        results[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  threads.clear();
  return results;
}

Call call(std::int64_t sequence, std::string text) {
  return {.sequence = sequence, .op = "all_gather", .text = std::move(text)};
}

TEST(RendezvousTest, AChunkThatThrowsEndsAllAndNamesWhoseItWas) {
  for (const bool shared : {true, false}) {
    for (int round = 0; round < 20; ++round) {
      const auto group = make_group(3);
      std::atomic<int> num_run = 0;
      const auto results = on_threads(3, [&](int rank) {
        group->meet(rank, call(0, "all_gather 'h.0'"), {},
                    {.num_per_block = 4,
                     .shared = shared,
                     .run = [&](std::span<const Slot>, int block, std::int64_t chunk) {
                       ++num_run;
                       if (block == 1 && chunk == 2) throw std::bad_alloc();
                     }});
      });
      EXPECT_EQ(num_run, 12);  // the others' work is not left undone
      int num_bad_alloc = 0;
      for (const std::string& result : results) {
        if (result == "bad_alloc") {
          ++num_bad_alloc;
        } else {
          EXPECT_THAT(result, AllOf(HasSubstr("[all_gather #0 of group] rank 11 failed: "),
                                    HasSubstr("bad_alloc"), HasSubstr("all_gather 'h.0'")));
        }
      }
      EXPECT_EQ(num_bad_alloc, 1);
      EXPECT_TRUE(shared || results[1] == "bad_alloc");
      EXPECT_TRUE(group->world()->has_failed());
    }
  }
}

TEST(RendezvousTest, WorkThatIsNotSharedIsDoneByItsRank) {
  const auto group = make_group(4);
  std::vector<std::thread::id> ran(4), own(4);
  on_threads(4, [&](int rank) {
    own[static_cast<std::size_t>(rank)] = std::this_thread::get_id();
    group->meet(rank, call(0, "x"), {},
                {.num_per_block = 1,
                 .shared = false,
                 .run = [&](std::span<const Slot>, int block, std::int64_t) {
                   ran[static_cast<std::size_t>(block)] = std::this_thread::get_id();
                 }});
  });
  EXPECT_EQ(ran, own);
}

TEST(RendezvousTest, WorkThatIsNotSharedIsWaitedForUntilTheDeadline) {
  const auto group = make_group(2, milliseconds(100));
  std::atomic<bool> others_gone = false;
  const auto results = on_threads(2, [&](int rank) {
    struct Gone {
      std::atomic<bool>& flag;
      bool mine;
      ~Gone() { flag = flag || mine; }
    } const gone{others_gone, rank == 0};
    group->meet(rank, call(0, "x"), {},
                {.num_per_block = 1,
                 .shared = false,
                 .run = [&](std::span<const Slot>, int block, std::int64_t) {
                   while (block == 1 && !others_gone) std::this_thread::yield();
                 }});
  });
  EXPECT_THAT(results[0], AllOf(HasSubstr("expected 2 ranks within 100 ms"),
                                HasSubstr("all have called it, not all have done it")));
}

// Whoever has left may have freed what a chunk reads.
TEST(RendezvousTest, AfterTheDeadlineNoWorkIsBegun) {
  const auto group = make_group(2, milliseconds(100));
  std::atomic<bool> gone = false, begun_after = false;
  const auto results = on_threads(2, [&](int rank) {
    const std::unique_ptr<int, std::function<void(int*)>> leaves(
        &rank, [&](const int* who) { gone = gone || *who == 0; });
    group->meet(rank, call(0, "x"), {},
                {.num_per_block = 2,
                 .shared = false,
                 .run = [&](std::span<const Slot>, int block, std::int64_t chunk) {
                   begun_after = begun_after || gone;
                   while (block == 1 && chunk == 0 && !gone) std::this_thread::yield();
                 }});
  });
  EXPECT_FALSE(begun_after);
  for (const std::string& result : results) {
    EXPECT_THAT(result, HasSubstr("all have called it, not all have done it"));
  }
}

TEST(RendezvousTest, WorkThatIsDoneSoonAfterTheDeadlineIsWaitedFor) {
  const auto group = make_group(2, milliseconds(100));
  std::atomic<bool> gone = false, gone_before = false;
  on_threads(2, [&](int rank) {
    const std::unique_ptr<int, std::function<void(int*)>> leaves(
        &rank, [&](const int* who) { gone = gone || *who == 0; });
    group->meet(rank, call(0, "x"), {},
                {.num_per_block = 1,
                 .shared = false,
                 .run = [&](std::span<const Slot>, int block, std::int64_t) {
                   if (block == 0) return;
                   while (!group->world()->has_failed()) std::this_thread::yield();
                   std::this_thread::sleep_for(milliseconds(50));
                   gone_before = gone.load();
                 }});
  });
  EXPECT_FALSE(gone_before);
}

TEST(RendezvousTest, AnnouncedCallsAreComparedAndNotWaitedFor) {
  const auto group = make_group(3);
  group->announce(1, call(0, "a"));
  group->announce(1, call(1, "b"));
  group->announce(0, call(0, "a"));
  group->announce(2, call(0, "a"));
  try {
    group->announce(2, call(1, "c"));
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "[all_gather #1 of group] expected rank 11's b, got rank 12's c");
  }
  EXPECT_THROW(group->announce(0, call(1, "b")), CommError);
}

// What check() says, if the world has failed.
std::string failure_of(World& world) {
  try {
    world.check();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no failure";
}

TEST(RendezvousTest, ARankThatLeavesFailsTheFirstCallThatItDoesNotComeTo) {
  const std::string expected =
      "[all_gather #1 of group] expected 2 ranks, got: rank 11 has left the group, last seen in "
      "#0 a; b";
  for (const bool leaves_first : {false, true}) {
    const auto group = make_group(2);
    for (const int rank : {0, 1}) group->announce(rank, call(0, "a"));
    if (!leaves_first) group->announce(0, call(1, "b"));
    EXPECT_EQ(failure_of(*group->world()), "no failure");
    group->depart(1, 1);
    if (leaves_first) {
      EXPECT_EQ(failure_of(*group->world()), "no failure") << "nobody waits for it yet";
      group->announce(0, call(1, "b"));
    }
    EXPECT_EQ(failure_of(*group->world()), expected);
  }
}

TEST(RendezvousTest, ARankThatLeavesIsNotMissedWhereItHasBeen) {
  const auto group = make_group(2);
  group->announce(1, call(0, "a"));
  group->announce(1, call(1, "b"));
  group->depart(1, 2);
  group->announce(0, call(0, "a"));
  group->announce(0, call(1, "b"));
  EXPECT_EQ(failure_of(*group->world()), "no failure");
}

TEST(RendezvousTest, AGroupThatHasGoneIsNotTold) {
  const auto world = std::make_shared<World>(kLong);
  Rendezvous other(world, "other", {0, 1});
  // In memory that then looks like anything but a group.
  alignas(Rendezvous) std::array<std::byte, sizeof(Rendezvous)> memory;
  auto* group = new (memory.data()) Rendezvous(world, "group", {0, 1});
  group->announce(0, call(0, "a"));
  std::destroy_at(group);
  memory.fill(std::byte{0xFF});
  world->fail("the end");
  EXPECT_EQ(failure_of(*world), "the end");
}

TEST(RendezvousTest, AnExpiredCallNamesWhoHasNotCalledIt) {
  const auto group = make_group(3, milliseconds(70));
  for (int r = 0; r < 3; ++r) group->announce(r, call(0, "a"));
  group->announce(1, call(1, "b"));
  group->expire(call(1, "b"));
  try {
    group->world()->check();
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(),
                 "[all_gather #1 of group] expected 3 ranks within 70 ms, got 1: ranks 10, 12 are "
                 "missing, last seen in #0 a; b");
  }
}

// What `group` says of call #1 when its ranks below `here` have called it, after a call #0 that
// only some came to.
std::string expired(const std::shared_ptr<Rendezvous>& group, int here,
                    const std::function<bool(int rank)>& came) {
  for (int r = 0; r < group->size(); ++r) {
    if (came(r)) group->announce(r, call(0, "a"));
  }
  for (int r = 0; r < here; ++r) group->announce(r, call(1, "b"));
  group->expire(call(1, "b"));
  try {
    group->world()->check();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

TEST(RendezvousTest, RanksThatAreMissingAreGroupedByWhereTheyWereLastSeen) {
  const auto group = make_group(9, milliseconds(70));
  EXPECT_EQ(expired(group, 1, [](int rank) { return rank == 3 || rank == 4 || rank == 6; }),
            "[all_gather #1 of group] expected 9 ranks within 70 ms, got 1: ranks 11-12, 15, 17-18 "
            "are missing, last seen in nothing; ranks 13-14, 16 are missing, last seen in #0 a; b");
}

TEST(RendezvousTest, AMissingRankThatWaitsInAnotherGroupIsToldWithWhereItWaits) {
  const auto group = make_group(4, milliseconds(70));
  Rendezvous pair(group->world(), "pair", {12, 13});
  Rendezvous other_pair(group->world(), "other_pair", {10, 11});
  pair.announce(0, call(3, "c"));  // rank 12 waits for rank 13
  const Call declared{.sequence = 0, .op = Rendezvous::kDeclare, .text = "d"};
  pair.announce(1, declared);            // which rank 13 does not wait for
  other_pair.announce(0, call(7, "e"));  // rank 10 comes to the group all the same
  EXPECT_EQ(
      expired(group, 2, [](int) { return false; }),
      "[all_gather #1 of group] expected 4 ranks within 70 ms, got 2: rank 12 is missing, last "
      "seen in nothing, waiting in #3 c of pair; rank 13 is missing, last seen in nothing; b");
}

TEST(RendezvousTest, WhatIsDeclaredIsComparedAndIsNoPlaceToBeSeenIn) {
  const auto group = make_group(2, milliseconds(70));
  const auto declared = [](std::int64_t sequence, std::string text) {
    return Call{.sequence = sequence, .op = Rendezvous::kDeclare, .text = std::move(text)};
  };
  for (const int rank : {0, 1}) group->announce(rank, declared(0, "a"));
  group->announce(1, call(1, "b"));
  group->announce(1, declared(2, "c"));  // by the host, ahead of its streams
  group->announce(0, call(1, "b"));
  group->announce(0, declared(2, "c"));
  EXPECT_EQ(failure_of(*group->world()), "no failure");
  group->announce(0, call(3, "d"));
  group->expire(call(3, "d"));
  EXPECT_THAT(failure_of(*group->world()), HasSubstr("rank 11 is missing, last seen in #1 b; d"));

  const auto differing = make_group(2);
  differing->announce(1, declared(0, "a"));
  EXPECT_THROW(differing->announce(0, call(0, "b")), CommError);
  EXPECT_EQ(failure_of(*differing->world()),
            "[call #0 of group] expected rank 11's a, got rank 10's b");
}

TEST(RendezvousTest, RanksThatHaveLeftAreToldFromThoseThatAreMissing) {
  const auto group = make_group(5);
  group->depart(3, 5);
  group->depart(1, 1);
  group->depart(2, 1);
  try {
    group->announce(0, call(1, "b"));
    group->world()->check();
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(),
                 "[all_gather #1 of group] expected 5 ranks, got: ranks 11-12 have left the group, "
                 "last seen in nothing; b");
  }
}

TEST(RendezvousTest, AMessageIsShortHoweverManyRanksAreMissing) {
  const int size = 1000;
  // One call for all; every other rank; and calls that all differ, with long labels.
  const std::string same = expired(make_group(size), 1, [](int) { return false; });
  EXPECT_THAT(same, HasSubstr("got 1: ranks 11-1009 are missing, last seen in nothing; b"));
  const std::string odd = expired(make_group(size), 1, [](int rank) { return rank % 2 == 1; });
  EXPECT_THAT(odd, HasSubstr("ranks 11, 13, 15, 17, 19, 21, 23, 25 and 492 more are missing, last "
                             "seen in #0 a; ranks 12, 14, "));
  EXPECT_LT(odd.size(), 400u);

  const auto group = make_group(size);
  for (int r = 0; r < size; ++r) {
    group->announce(r, call(r + 2, std::string(500, '=')));
  }
  const std::string each = expired(group, 1, [](int) { return false; });
  EXPECT_THAT(each, AllOf(HasSubstr("rank 11 is missing, last seen in #3 ==="),
                          HasSubstr("rank 14 is missing"), HasSubstr("...; and 995 more ranks; b"),
                          Not(HasSubstr("rank 15"))));
  EXPECT_LT(each.size(), 1024u);
}

}  // namespace
}  // namespace tessera::comm
