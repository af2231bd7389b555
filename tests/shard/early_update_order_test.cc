// Updates while backward goes on: which collectives they make, in which order, among which ranks.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/threads.h"
#include "shard/fsdp.h"
#include "shard/optimizer/optimizer.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_rank.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using testing::CollectiveLog;
using testing::LoggedGroup;
using testing::ToyRank;

constexpr UpdateGathers kBoth[] = {UpdateGathers::kInterleaved, UpdateGathers::kContiguous};

// Of rank 0 in the second step; `with_sizes`: and among how many ranks each is.
std::vector<std::string> collectives(const std::string& name, UpdateGathers gathers, int ranks = 2,
                                     bool with_sizes = false) {
  std::vector<std::string> lines;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& all) {
    CollectiveLog log;
    LoggedGroup world(all, log);
    ToyRank rank(world, {.placement = Placement::preset(name)}, {.numel = 40, .poison = false});
    Sgd sgd(rank.fsdp, {});
    for (int step = 0; step < 2; ++step) {
      log.take();
      sgd.step_in_backward(0.1, gathers);
      rank.fsdp.begin_step();
      rank.tape.backward(rank.loss(0));
      rank.fsdp.finish_step();
    }
    if (world.rank() != 0) return;
    for (const CollectiveLog::Record& record : log.records()) {
      lines.push_back(record.text + (with_sizes ? " " + std::to_string(record.num_ranks) : ""));
    }
  });
  return lines;
}

using Lines = std::vector<std::string>;

TEST(EarlyUpdateOrder, GathersUpdatedPartsAtOnce) {
  EXPECT_EQ(collectives("zero1", UpdateGathers::kInterleaved),
            (Lines{"all_reduce h.2 gradient", "all_gather h.2 update", "all_reduce h.1 gradient",
                   "all_gather h.1 update", "all_reduce h.0 gradient", "all_gather h.0 update",
                   "all_reduce root gradient", "all_gather root update", "all_gather norm"}));
}

TEST(EarlyUpdateOrder, GathersUpdatedPartsAfterTheLastReduction) {
  EXPECT_EQ(collectives("zero2", UpdateGathers::kContiguous),
            (Lines{"reduce_scatter h.2 gradient", "reduce_scatter h.1 gradient",
                   "reduce_scatter h.0 gradient", "reduce_scatter root gradient",
                   "all_gather root update", "all_gather h.0 update", "all_gather h.1 update",
                   "all_gather h.2 update", "all_gather norm"}));
}

// What a plain step gathers, and nothing again.
TEST(EarlyUpdateOrder, GathersNothingMoreForZero3) {
  EXPECT_EQ(collectives("zero3", UpdateGathers::kInterleaved),
            (Lines{"all_gather h.1 forward", "all_gather h.2 forward", "all_gather h.1 backward",
                   "reduce_scatter h.2 gradient", "all_gather h.0 backward",
                   "reduce_scatter h.1 gradient", "reduce_scatter h.0 gradient",
                   "reduce_scatter root gradient", "all_gather root forward",
                   "all_gather h.0 forward", "all_gather norm"}));
}

// Two replicas of three ranks: what is cut in replicas is gathered among 3, and what is cut between
// them among 2. A gradient is reduced in the first replica, whose ranks hand the sums on and get
// back those of all.
Lines hybrid(const Lines& lines) {
  Lines expected;
  for (const std::string& line : lines) {
    if (!line.starts_with("reduce ")) {
      expected.push_back(line);
      continue;
    }
    const std::string gradient = line.substr(7) + " gradient ";
    expected.push_back("reduce_scatter " + gradient + "3");
    expected.insert(expected.end(), 2, "broadcast " + gradient + "2");
  }
  return expected;
}

// Replicas update alike, and have nothing to tell each other.
TEST(EarlyUpdateOrder, GathersNothingMoreForHsdp) {
  for (const UpdateGathers gathers : kBoth) {
    EXPECT_EQ(collectives("hsdp", gathers, 6, true),
              hybrid({"all_gather h.1 forward 3", "all_gather h.2 forward 3",
                      "all_gather h.1 backward 3", "reduce h.2", "all_gather h.0 backward 3",
                      "reduce h.1", "reduce h.0", "reduce root", "all_gather root forward 3",
                      "all_gather h.0 forward 3", "all_gather norm 3"}));
  }
}

TEST(EarlyUpdateOrder, GathersUpdatedPartsInsideReplicasForHybridZero2) {
  EXPECT_EQ(collectives("hybrid_zero2", UpdateGathers::kInterleaved, 6, true),
            hybrid({"reduce h.2", "all_gather h.2 update 3", "reduce h.1",
                    "all_gather h.1 update 3", "reduce h.0", "all_gather h.0 update 3",
                    "reduce root", "all_gather root update 3", "all_gather norm 3"}));
  EXPECT_EQ(collectives("hybrid_zero2", UpdateGathers::kContiguous, 6, true),
            hybrid({"reduce h.2", "reduce h.1", "reduce h.0", "reduce root",
                    "all_gather root update 3", "all_gather h.0 update 3",
                    "all_gather h.1 update 3", "all_gather h.2 update 3", "all_gather norm 3"}));
}

// A rank's shard is whole again before it is gathered for the next forward.
TEST(EarlyUpdateOrder, GathersUpdatedPartsBetweenReplicasForHfsdp) {
  EXPECT_EQ(
      collectives("hfsdp", UpdateGathers::kInterleaved, 6, true),
      hybrid({"all_gather h.1 forward 3", "all_gather h.2 forward 3", "all_gather h.1 backward 3",
              "reduce h.2", "all_gather h.2 update 2", "all_gather h.0 backward 3", "reduce h.1",
              "all_gather h.1 update 2", "reduce h.0", "all_gather h.0 update 2", "reduce root",
              "all_gather root update 2", "all_gather root forward 3", "all_gather h.0 forward 3",
              "all_gather norm 6"}));
  EXPECT_EQ(
      collectives("hfsdp", UpdateGathers::kContiguous, 6, true),
      hybrid({"all_gather h.1 forward 3", "all_gather h.2 forward 3", "all_gather h.1 backward 3",
              "reduce h.2", "all_gather h.0 backward 3", "reduce h.1", "reduce h.0", "reduce root",
              "all_gather root update 2", "all_gather root forward 3", "all_gather h.0 update 2",
              "all_gather h.1 update 2", "all_gather h.2 update 2", "all_gather h.0 forward 3",
              "all_gather norm 6"}));
}

}  // namespace
}  // namespace tessera::shard
