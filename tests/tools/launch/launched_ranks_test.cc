// How many ranks processes of a launcher have, and which of them are near each other.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

#include "tests/testing/errors.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;

TrainConfig config_of(int num_threads, int num_ranks = 0) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.threads = num_threads;
  config.parallel.ranks = num_ranks;
  return config;
}

// Process 4 of 6 on three hosts.
Launch on_three_hosts() {
  return {.by = LauncherChoice::kTorchrun,
          .process = 4,
          .num_processes = 6,
          .local_process = 0,
          .num_local_processes = 2,
          .host = 2,
          .num_hosts = 3};
}

TEST(LaunchedRanks, FollowOneAnotherProcessByProcess) {
  const Ranks ranks = Ranks::choose(config_of(3), on_three_hosts());
  EXPECT_EQ(ranks.size, 18);
  EXPECT_EQ(ranks.local.world_size, 18);
  EXPECT_EQ(ranks.local.first, 12);
  EXPECT_EQ(ranks.local.count, 3);
  EXPECT_EQ(ranks.local.num_before, 0);
  EXPECT_EQ(ranks.local.num_on_host, 6);
  EXPECT_EQ(ranks.launch_str(), "torchrun: 3 hosts x 2 processes x 3 threads, transport gloo");
  Launch second = on_three_hosts();
  second.process = 5;
  second.local_process = 1;
  EXPECT_EQ(Ranks::choose(config_of(3), second).local.num_before, 3);
}

TEST(LaunchedRanks, AreOneAProcessUnlessMoreAreAskedFor) {
  EXPECT_EQ(Ranks::choose(config_of(0), on_three_hosts()).size, 6);
  EXPECT_EQ(Ranks::choose(config_of(0, 6), on_three_hosts()).size, 6);
  EXPECT_EQ(Ranks::choose(config_of(2, 12), on_three_hosts()).size, 12);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([] { Ranks::choose(config_of(2, 6), on_three_hosts()); }),
          {"[launch] expected parallel.ranks=12, as there are 6 processes with "
           "parallel.threads=2, got 6 (torchrun, process 4 of 6"}));
  const Launch alone{.by = LauncherChoice::kSlurm};
  EXPECT_EQ(Ranks::choose(config_of(0), alone).size, 1);
  EXPECT_EQ(Ranks::choose(config_of(4), alone).size, 4);
  EXPECT_EQ(Ranks::choose(config_of(4, 4), alone).size, 4);
  EXPECT_EQ(Ranks::choose(config_of(4), alone).launch_str(),
            "slurm: 1 host x 1 process x 4 threads");
  EXPECT_TRUE(has(
      error_of<InvalidArgument>([&] { Ranks::choose(config_of(0, 4), alone); }),
      {"[launch] expected parallel.ranks=1, as there are 1 process with parallel.threads=1, got "
       "4 (slurm, process 0 of 1)"}));
}

TEST(LaunchedRanks, WithoutALauncherThreadsAreRanks) {
  EXPECT_EQ(Ranks::choose(config_of(0)).size, 4);
  EXPECT_EQ(Ranks::choose(config_of(3)).size, 3);
  EXPECT_EQ(Ranks::choose(config_of(3, 3)).size, 3);
  EXPECT_EQ(Ranks::choose(config_of(3)).launch_str(), "");
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { Ranks::choose(config_of(3, 2)); }),
                  {"[config] expected parallel.ranks=3 with parallel.threads=3 in one process, got "
                   "2"}));
}

TEST(LaunchedRanks, OfAReplicaShareAProcessOrElseAHost) {
  using Replica = std::pair<int, std::string_view>;
  const auto replica = [](int num_threads, const Launch& launch) {
    return Ranks::choose(config_of(num_threads), launch).replica();
  };
  Launch launch = on_three_hosts();
  EXPECT_EQ(replica(3, launch), Replica(3, "process"));
  EXPECT_EQ(replica(1, launch), Replica(2, "host"));
  launch.num_local_processes = 3;  // and others fewer
  EXPECT_EQ(replica(1, launch), Replica(0, ""));
  EXPECT_EQ(Ranks::choose(config_of(1), launch).launch_str(),
            "torchrun: 6 processes on 3 hosts x 1 thread, transport gloo");
  launch.host = launch.num_hosts = std::nullopt;
  EXPECT_EQ(replica(1, launch), Replica(0, ""));
  EXPECT_EQ(Ranks::choose(config_of(1), launch).launch_str(),
            "torchrun: 6 processes x 1 thread, transport gloo");
  launch.host = 0;
  launch.num_hosts = 1;
  launch.num_local_processes = 6;
  EXPECT_EQ(replica(1, launch), Replica(0, ""));
  EXPECT_EQ(replica(2, launch), Replica(2, "process"));
  EXPECT_EQ(replica(2, {}), Replica(0, ""));
  EXPECT_EQ(replica(2, {.by = LauncherChoice::kTorchrun}), Replica(0, ""));
}

}  // namespace
}  // namespace tessera::tools
