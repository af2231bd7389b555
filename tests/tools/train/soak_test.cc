// A long run of everything that goes on during training: what it holds at the end it held at the
// beginning.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/philox.h"
#include "tests/testing/failing_new.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"
#include "tools/launch/ranks.h"
#include "tools/models/mlp.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using testing::Holdings;
using testing::holdings;

constexpr std::int64_t kSteps = 500, kWindow = 100;

std::int64_t resident_nbytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

struct Sample {
  Holdings holds;
  std::int64_t nbytes = 0;
};

// The least of some steps: what comes and goes, as a checkpoint's files, is not always there.
Sample least(const std::vector<Sample>& samples, std::int64_t begin) {
  Sample least = samples.at(static_cast<std::size_t>(begin));
  for (std::int64_t i = begin; i < begin + kWindow; ++i) {
    const Sample& s = samples.at(static_cast<std::size_t>(i));
    least.holds.num_threads = std::min(least.holds.num_threads, s.holds.num_threads);
    least.holds.num_open_files = std::min(least.holds.num_open_files, s.holds.num_open_files);
    least.holds.num_allocations = std::min(least.holds.num_allocations, s.holds.num_allocations);
    least.nbytes = std::min(least.nbytes, s.nbytes);
  }
  return least;
}

// Up to `max_us`, another time for each `number`.
void dawdle(std::uint64_t number, std::uint32_t max_us) {
  const auto bits = engine::philox(11, number, 0)[0];
  std::this_thread::sleep_for(std::chrono::microseconds(bits % max_us));
}

TEST(Soak, AtTheEndOfALongRunNothingMoreIsHeldThanAtItsBeginning) {
  const testing::TempFolder folder;
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = 3;
  config.parallel.prefetch = 2;
  config.out = folder.path();
  config.log.every = 0;
  config.log.val_every = 3;
  config.train.steps = kSteps;
  config.train.batch = 2;
  config.train.accum = 2;
  config.train.lr = 1e-3;
  config.train.verify_every = 25;
  config.checkpoint.every = 2;
  config.checkpoint.keep = 2;
  std::vector<Sample> samples;
  samples.reserve(kSteps);
  RunLog log(config, "samples");
  Ranks::choose(config).run(config, [&](comm::ProcessGroup& world) {
    const auto rank = static_cast<std::uint64_t>(world.rank());
    Mlp mlp({.inputs = 40, .hidden = 50, .layers = 4, .classes = 3});
    Trainer trainer(world, engine::Stream::inline_cpu("compute", {.delay_seed = rank + 1}), config,
                    mlp.blocks(), mlp.root(), rank == 0 ? &log : nullptr);
    trainer.open_checkpoints({"mlp", "data", ""});
    if (rank == 0) {
      trainer.on_step([&](const StepRecord&) {
        samples.push_back({holdings(), resident_nbytes()});
      });
    }
    const auto fill = [&](std::int64_t first, const Batch& host) {
      dawdle(static_cast<std::uint64_t>(first) * 3 + rank, 3000);
      const engine::RandomStream random{3, static_cast<std::uint64_t>(first)};
      for (std::int64_t i = 0; i < 80; ++i) {
        host[0].data<float>()[i] = random.normal(static_cast<std::uint64_t>(i));
      }
      for (std::int64_t i = 0; i < 2; ++i) {
        host[1].data<std::int32_t>()[i] = static_cast<std::int32_t>((first + i) % 3);
      }
    };
    const std::vector<BatchTensor> tensors = {{"x", {2, 40}, engine::DType::kF32},
                                              {"y", {2}, engine::DType::kI32}};
    const auto validate = [&]() -> Trainer::Validation {
      const double loss = trainer.mean_loss(4, [&](std::int64_t batch) {
        const engine::Memory memory;
        return mlp.loss(
            trainer.tape(),
            load_batch(memory, tensors, [&](const Batch& host) { fill(10'000 + batch, host); }),
            {});
      });
      return {loss, ""};
    };
    trainer.run(
        {tensors, fill},
        [&](std::int64_t, const Batch& batch) { return mlp.loss(trainer.tape(), batch, {}); },
        validate, 1);
  });
  ASSERT_EQ(std::ssize(samples), kSteps);
  const Sample first = least(samples, kWindow), last = least(samples, kSteps - kWindow);
  EXPECT_LE(last.holds.num_threads, first.holds.num_threads);
  EXPECT_LE(last.holds.num_open_files, first.holds.num_open_files);
  // The summary keeps the times of the last 10,000 steps, four in an allocation; and some 50 come
  // and go. What is lost once in a validation would be 100.
  EXPECT_LE(last.holds.num_allocations,
            first.holds.num_allocations + (kSteps - 2 * kWindow) / 4 + 80);
  if (!testing::kIsSlow) {
    EXPECT_LE(last.nbytes, first.nbytes + (std::int64_t{1} << 20));
  }
  EXPECT_EQ(folder.read("checkpoints/latest"), "step_" + std::to_string(kSteps) + "\n");
}

}  // namespace
}  // namespace tessera::tools
