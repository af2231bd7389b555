// A guard that ends a training on GPUs, where a step is read after the launch of the next.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

#include "comm/process_group.h"
#include "engine/error.h"
#include "engine/tape.h"
#include "ops/linear.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/launch/ranks.h"
#include "tools/report/run_log.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using testing::has;

TEST(CudaGuard, TheLogHasEveryStepBeforeTheOneThatIsWrong) {
  constexpr std::int64_t kRanks = 2, kWrong = 4;
  const testing::TempFolder folder;
  TrainConfig config;
  config.device = DeviceChoice::kCuda;
  config.parallel.ranks = kRanks;
  config.out = folder.path();
  config.log.every = 0;
  config.train.steps = 6;
  config.train.batch = 1;
  config.train.spike_factor = 4;
  config.checkpoint.every = 100;
  const Ranks ranks = Ranks::choose(config);
  RunLog log(config, "samples");
  const auto train = [&] {
    ranks.run(config, [&](comm::ProcessGroup& world) {
      engine::Parameter w{.name = "w", .shape = {4, 1}, .init = engine::Init::ones()};
      engine::Block block{"block", {&w}};
      const bool is_first = world.rank() == 0;
      Trainer trainer(world, ranks.compute(world.rank()), config, {&block}, nullptr,
                      is_first ? &log : nullptr);
      trainer.open_checkpoints({"linear", "data", ""});
      world.barrier("loaded");
      if (is_first) log.begin();
      const auto fill = [&](std::int64_t first, const Batch& host) {
        const bool is_wrong = first / kRanks == kWrong - 1;
        for (float& x : host[0].span<float>()) {
          x = is_wrong ? std::numeric_limits<float>::quiet_NaN() : 0.5f;
        }
      };
      const auto loss = [&](std::int64_t, const Batch& batch) {
        engine::Tape& tape = trainer.tape();
        return tape.region(block, [&] { return ops::linear(tape, batch[0], w, nullptr); });
      };
      trainer.run({{{"x", {1, 4}, engine::DType::kF32}}, fill}, loss, nullptr, 1);
    });
  };
  const std::string error = testing::error_of<engine::Error>(train);
  EXPECT_TRUE(has(error, {"the loss is nan", "made again from the same state as well",
                          "(step 4; the state before it is in ", "/step_3"}))
      << error;
  log.flush();
  std::istringstream records(folder.read("log.jsonl"));
  std::int64_t num_steps = 0;
  for (std::string line; std::getline(records, line);) {
    EXPECT_TRUE(line.starts_with("{\"step\":" + std::to_string(++num_steps) + ",")) << line;
  }
  EXPECT_EQ(num_steps, kWrong - 1);
}

}  // namespace
}  // namespace tessera::tools
