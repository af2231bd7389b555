// What is said of a hybrid's replicas.
#include "tools/config/replicas.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera::tools {
namespace {

TrainConfig config_of(const std::string& strategy, int shard_ranks = 0) {
  TrainConfig config;
  config.parallel.strategy = strategy;
  config.parallel.shard_ranks = shard_ranks;
  return config;
}

TEST(Replicas, HybridsAlwaysSayTheirSize) {
  for (const char* hybrid : {"hsdp", "hybrid_zero2", "hfsdp"}) {
    EXPECT_EQ(replicas_text(config_of(hybrid), 1), "replicas of 1");
    EXPECT_EQ(replicas_text(config_of(hybrid), 3), "replicas of 1");
    EXPECT_EQ(replicas_text(config_of(hybrid), 4), "replicas of 2");
    EXPECT_EQ(replicas_text(config_of(hybrid, 3), 3), "replicas of 3");
  }
  TrainConfig placed = config_of("hsdp");
  placed.parallel.replica_ranks = 2;
  placed.parallel.replica_place = "process";
  EXPECT_EQ(replicas_text(placed, 6), "replicas of 2, one per process");
  EXPECT_EQ(replicas_warning(placed, 2), "");
  placed.parallel.shard_ranks = 3;
  EXPECT_EQ(replicas_text(placed, 6), "replicas of 3");
  EXPECT_EQ(replicas_text(config_of("zero3"), 4), "");
  EXPECT_EQ(replicas_text(config_of("ddp"), 4), "");
}

TEST(Replicas, OfOneRankAreWarnedOfWhereNobodyAskedForThem) {
  EXPECT_EQ(replicas_warning(config_of("hsdp"), 3),
            "warning: hsdp on 3 ranks has replicas of 1 rank: nothing is cut, as with ddp; 4 ranks "
            "or --parallel.shard_ranks make larger ones");
  EXPECT_EQ(replicas_warning(config_of("hybrid_zero2"), 2),
            "warning: hybrid_zero2 on 2 ranks has replicas of 1 rank: nothing is cut, as with ddp; "
            "4 ranks or --parallel.shard_ranks make larger ones");
  EXPECT_EQ(replicas_warning(config_of("hfsdp"), 5),
            "warning: hfsdp on 5 ranks has replicas of 1 rank: only the optimizer's state is cut, "
            "as with zero1; 6 ranks or --parallel.shard_ranks make larger ones");
  EXPECT_EQ(replicas_warning(config_of("hsdp", 1), 3), "");
  EXPECT_EQ(replicas_warning(config_of("hsdp", 3), 3), "");
  EXPECT_EQ(replicas_warning(config_of("hsdp"), 1), "");
  EXPECT_EQ(replicas_warning(config_of("hsdp"), 4), "");
  EXPECT_EQ(replicas_warning(config_of("ddp"), 3), "");
}

}  // namespace
}  // namespace tessera::tools
