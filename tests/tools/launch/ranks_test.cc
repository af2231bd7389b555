// Ranks that have failed, and one that never returns: the process ends and says why.
#include "tools/launch/ranks.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "engine/device.h"
#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/flight/flight_file.h"
#include "tools/flight/flight_verdict.h"
#include "tools/planning/task_plan.h"
#include "tools/report/flight_output.h"

namespace tessera::tools {
namespace {

TrainConfig config_of(double deadline_s) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = 3;
  config.parallel.deadline_s = deadline_s;
  return config;
}

TEST(PlanTarget, KnowsWhatMovesTensorsAndInWhichOrderItAdds) {
  for (const bool nccl : {false, true}) {
    for (const bool canonical : {false, true}) {
      TrainConfig config;
      config.parallel.canonical = canonical;
      config.rates.link_gbs = 7;
      const PlanTarget target =
          plan_target({.size = 4, .num_gpus = nccl ? 4 : 0, .nccl = nccl}, config, 3);
      EXPECT_EQ(target.num_ranks, 4);
      EXPECT_EQ(target.rank, 3);
      EXPECT_EQ(target.on_gpus, nccl);
      EXPECT_EQ(target.stages, nccl);
      EXPECT_EQ(target.sums_in_rank_order, !nccl || canonical);
      EXPECT_DOUBLE_EQ(target.rates.link_bytes_per_s, 7e9);
    }
  }
}

TEST(Ranks, OnGpusNeedABuildThatHasTheirKernels) {
  if (engine::kCudaBuilt) return;
  TrainConfig config = config_of(1);
  config.device = DeviceChoice::kCuda;
  EXPECT_EQ(testing::error_of<engine::DeviceError>([&] { Ranks::choose(config); }),
            "[device] expected a build with CUDA, got one without: build where a CUDA Toolkit is, "
            "and without NO_CUDA (device=cuda)");
}

TEST(Ranks, OneThatNeverReturnsIsNamedAndEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const TrainConfig config = config_of(1);  // in which the others must come
  EXPECT_EXIT(Ranks::choose(config).run(config,
                                        [](comm::ProcessGroup& world) {
                                          ::alarm(30);  // ends a test that hangs
                                          if (world.rank() == 1) {
                                            for (;;) ::pause();
                                          }
                                          world.barrier("step");
                                        }),
              ::testing::ExitedWithCode(1),
              "warning: waiting for ranks that have not ended after.*rank 1 is missing(.|\n)*"
              "error: .*rank 1 is missing");
}

TEST(Ranks, ThatEndAfterAnErrorThrowIt) {
  const TrainConfig config = config_of(300);
  EXPECT_THROW(Ranks::choose(config).run(config,
                                         [](comm::ProcessGroup& world) {
                                           if (world.rank() == 1) throw std::logic_error("mine");
                                           world.barrier("step");
                                         }),
               std::logic_error);
}

TEST(Ranks, WhatTheyCalledIsWrittenBeforeTheProcessEndsWithoutThem) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const TrainConfig config = config_of(1);  // in which the others must come
  const testing::TempFolder folder;
  const auto run = [&](const std::string& out) {
    FlightOutput flight(out);
    Ranks::choose(config).run(
        config,
        [](comm::ProcessGroup& world) {
          ::alarm(30);  // ends a test that hangs
          if (world.rank() == 1) {
            for (;;) ::pause();
          }
          world.barrier("step");
        },
        &flight);
  };
  EXPECT_EXIT(run(::getenv("TEST_TMPDIR")), ::testing::ExitedWithCode(1),
              "what each rank called last: .*/flight.json .*//tools:doctor --flight(.|\n)*"
              "error: .*rank 1 is missing");
  const FlightFile file = read_flight(std::string(::getenv("TEST_TMPDIR")) + "/flight.json");
  EXPECT_EQ(judge({&file, 1}).finding, FlightFinding::kLate);
  // A file that cannot be written hides no error.
  EXPECT_EXIT(run(folder / "is not there"), ::testing::ExitedWithCode(1),
              "what each rank called last could not be written: .*is not there(.|\n)*"
              "error: .*rank 1 is missing");
}

}  // namespace
}  // namespace tessera::tools
