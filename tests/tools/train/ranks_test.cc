// Ranks that have failed, and one that never returns: the process ends and says why.
#include "tools/train/ranks.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <stdexcept>

#include "engine/error.h"

namespace tessera::tools {
namespace {

TrainConfig config_of(double deadline_s) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = 3;
  config.parallel.deadline_s = deadline_s;
  return config;
}

TEST(Ranks, OneThatNeverReturnsIsNamedAndEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const TrainConfig config = config_of(0.2);
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

}  // namespace
}  // namespace tessera::tools
