// What a trainer says of its time and its memory: a step's parts, waits, peaks, and the time left.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "comm/forwarding_group.h"
#include "comm/threads.h"
#include "tests/testing/errors.h"
#include "tests/tools/train/linear_training.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::Tensor;
using testing::has;

TEST(Trainer, NoTimeIsLeftAfterTheLastStep) {
  TrainConfig config = config_of(1, 1, 1);
  config.log.every = 1;
  const auto train = [](const LinearRank& rank) {
    rank.trainer.run(
        rank.data(),
        [&](std::int64_t, const Batch& batch) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1050));
          return rank.loss(batch);
        },
        nullptr, 1);
  };
  EXPECT_TRUE(has(stdout_of([&] { run_ranks(config, train); }), {"step     1/1 ", "ETA 0:00\n"}));
}

// A loss that takes 20 ms, two micro-steps a step.
std::vector<nlohmann::json> run_slowly(const TrainConfig& config) {
  return run_ranks(config, [](const LinearRank& rank) {
    rank.trainer.run(
        rank.data(),
        [&](std::int64_t, const Batch& batch) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return rank.loss(batch);
        },
        nullptr, 1);
  });
}

TEST(Trainer, ThePartsOfAStepAreDisjoint) {
  for (const nlohmann::json& line : run_slowly(config_of(2, 2, 3))) {
    const auto ms = [&](const char* name) { return line.at(name).get<double>(); };
    EXPECT_GE(ms("compute_ms"), 40);
    for (const char* part : {"exposed_comm_ms", "optimizer_ms", "data_ms"}) EXPECT_GE(ms(part), 0);
    const double parts =
        ms("compute_ms") + ms("exposed_comm_ms") + ms("optimizer_ms") + ms("data_ms");
    EXPECT_GT(ms("step_ms"), parts);  // what is left is the norm, and such
  }
}

TEST(Trainer, AnUpdateDuringBackwardHasNoTimeOfItsOwn) {
  TrainConfig config = config_of(2, 2, 2);
  config.train.overlap_optimizer = OverlapOptimizer::kBackward;
  for (const nlohmann::json& line : run_slowly(config)) {
    EXPECT_FALSE(line.contains("optimizer_ms"));
    EXPECT_GE(line.at("compute_ms").get<double>(), 40);
  }
}

// What is waited for a peer is communication, not computing.
TEST(Trainer, WaitingForAPeerIsExposedCommunication) {
  TrainConfig config = config_of(2, 1, 2);
  config.parallel.prefetch = 0;  // so that forward waits for the peer's part
  const auto lines = run_ranks(config, [](const LinearRank& rank) {
    rank.trainer.run(
        rank.data(),
        [&](std::int64_t, const Batch& batch) {
          if (rank.world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
          return rank.loss(batch);
        },
        nullptr, 1);
  });
  for (const nlohmann::json& line : lines) {
    const auto ms = [&](const char* name) { return line.at(name).get<double>(); };
    EXPECT_GT(ms("exposed_comm_ms"), 0);
    EXPECT_GT(ms("step_ms"), ms("exposed_comm_ms") + ms("compute_ms"));
  }
}

// Holds up one rank where the losses of a step are gathered, once the other has come there: as
// where another thread has its core, that is no wait for an event.
class SlowAtLosses final : public comm::ForwardingGroup {
 public:
  SlowAtLosses(ProcessGroup& inner, bool is_slow, std::barrier<>& all_there)
      : ForwardingGroup(inner), is_slow_(is_slow), all_there_(all_there) {}

 private:
  void before(const comm::Collective& c, const engine::Stream&) override {
    if (c.work.detail != "values") return;
    all_there_.arrive_and_wait();
    if (is_slow_) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    return inner().split(color, key);
  }

  bool is_slow_;
  std::barrier<>& all_there_;
};

// Whoever of the two it is: rank 0, whose time the log tells, has nothing else to do.
TEST(Trainer, AfterItsPartOfAStepARankWaitsForTheOthers) {
  for (const int slow : {0, 1}) {
    const TrainConfig config = config_of(2, 1, 2);
    std::vector<StepRecord> records;
    std::barrier all_there(2);
    comm::run_ranks(2, {}, [&](ProcessGroup& threads) {
      SlowAtLosses world(threads, threads.rank() == slow, all_there);
      LinearModel model;
      Trainer trainer(world, engine::Stream::inline_cpu("compute"), config, {&model.block}, nullptr,
                      nullptr);
      if (world.rank() == 0) trainer.on_step([&](const StepRecord& r) { records.push_back(r); });
      LinearRank{world, trainer, model, config}.run();
    });
    ASSERT_EQ(records.size(), 2u);
    for (const StepRecord& r : records) {
      EXPECT_GE(r.exposed_comm_ms, 99) << "rank " << slow;
      ASSERT_TRUE(r.other_ms().has_value());
      EXPECT_GE(*r.other_ms(), -1e-6);  // the parts add up to no more than the step
      EXPECT_GE(r.step_ms, r.exposed_comm_ms + *r.compute_ms + *r.optimizer_ms + r.data_ms - 1e-6);
    }
  }
}

// The log says what the run needed so far, the audit what a step did.
TEST(Trainer, PeaksAreOfTheRunAndOfTheStep) {
  constexpr std::int64_t kLarge = 1'000'000;  // bytes, in the second of three steps
  std::vector<StepRecord> records;
  const auto lines = run_ranks(config_of(1, 1, 3), [&](const LinearRank& rank) {
    rank.trainer.on_step([&](const StepRecord& r) { records.push_back(r); });
    int step = 0;
    rank.trainer.run(
        rank.data(),
        [&](std::int64_t, const Batch& batch) {
          if (++step == 2) {
            Tensor::empty(rank.trainer.tape().memory(), {kLarge / 4}, DType::kF32, "large",
                          engine::Category::kWorkspace);
          }
          return rank.loss(batch);
        },
        nullptr, 1);
  });
  ASSERT_EQ(records.size(), 3u);
  constexpr auto kWorkspace = static_cast<std::size_t>(engine::Category::kWorkspace);
  EXPECT_LT(records[0].step_memory.peak_nbytes[kWorkspace], kLarge);
  EXPECT_GE(records[1].step_memory.peak_nbytes[kWorkspace], kLarge);
  EXPECT_LT(records[2].step_memory.peak_nbytes[kWorkspace], kLarge);
  EXPECT_LT(lines[0].at("peak_bytes").at("workspace").get<std::int64_t>(), kLarge);
  EXPECT_GE(lines[1].at("peak_bytes").at("workspace").get<std::int64_t>(), kLarge);
  EXPECT_GE(lines[2].at("peak_bytes").at("workspace").get<std::int64_t>(), kLarge);
}

}  // namespace
}  // namespace tessera::tools
