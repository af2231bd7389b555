// What only the emulated device can count: that a step of training holds up neither host nor GPU.
#include <gtest/gtest.h>

#include <string>

#include "tests/tools/train/gpt_run.h"
#include "third_party/cuda/emulation/control.h"

namespace tessera::tools {
namespace {

using cuda_emulation::Calls;
using cuda_emulation::Live;

constexpr GptConfig kModel = {.layers = 2, .heads = 2, .dim = 16, .seq = 8, .vocab = 32};
constexpr std::int64_t kRanks = 2;

Calls train(std::int64_t steps, const char* strategy, BackendChoice backend) {
  const testing::TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("text.txt", std::string(500, '\7'))),
                          {.seq = kModel.seq, .vocab = kModel.vocab});
  TrainConfig config;
  config.device = DeviceChoice::kCuda;
  config.parallel.ranks = kRanks;
  config.parallel.backend = backend;
  config.parallel.strategy = strategy;
  config.train.steps = steps;
  config.train.accum = 2;
  config.train.batch = 1;
  config.train.lr = 1e-3;
  config.train.schedule = ScheduleKind::kConstant;
  cuda_emulation::start_counting();
  testing::run_gpt(config, kModel, data);
  return cuda_emulation::calls();
}

TEST(EmulatedTraining, AStepWaitsForNothingButTheLastOnesLossAndNorm) {
  for (const char* strategy : {"zero3", "ddp"}) {
    for (const BackendChoice backend : {BackendChoice::kThreads, BackendChoice::kNccl}) {
      constexpr std::int64_t kSteps = 4;
      const Calls few = train(kSteps, strategy, backend);
      const Calls many = train(2 * kSteps, strategy, backend);
      const std::string what =
          std::string(strategy) + (backend == BackendChoice::kNccl ? ", nccl" : ", threads");
      EXPECT_EQ(many.blocking - few.blocking, 2 * kSteps * kRanks) << what;
      EXPECT_EQ(many.mallocs, few.mallocs) << what;
      EXPECT_EQ(cuda_emulation::live(), Live()) << what << ": something was left";
    }
  }
}

}  // namespace
}  // namespace tessera::tools
