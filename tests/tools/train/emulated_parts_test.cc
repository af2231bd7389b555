// The parts of a step on a GPU: what is planted to be slow is found in the part that it belongs to.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "ops/linear.h"
#include "tests/emulator/control.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::Stream;

constexpr double kSlowMs = 60;
constexpr std::int64_t kAccum = 2;

void sleep_slowly() {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(kSlowMs));
}

/// Holds the GPU up, not the host, before the work `name` of a stream.
class SlowWork final : public engine::LaunchListener {
 public:
  explicit SlowWork(std::string name) : name_(std::move(name)) {}
  std::optional<std::uint64_t> on_enqueue(const engine::LaunchRequest& request) noexcept override {
    if (request.work.name == name_) hold_up(*stream);
    return std::nullopt;
  }
  void on_launch(const engine::LaunchRecord&) noexcept override {}
  static void hold_up(const Stream& stream) {
    EXPECT_EQ(
        cudaLaunchHostFunc(
            static_cast<cudaStream_t>(stream.native()), [](void*) { sleep_slowly(); }, nullptr),
        cudaSuccess);
  }

  const Stream* stream = nullptr;  ///< not null once it launches

 private:
  const std::string name_;
};

struct Slow {
  std::string work = "nothing";  ///< of compute
  bool loader = false;           ///< on the host, each batch
  int gpu_of_loss = -1;          ///< of this rank, before its loss
};

/// The steps of rank 0 of two.
std::vector<StepRecord> run(const Slow& slow, TrainConfig config = {}) {
  config.train.accum = kAccum;
  config.train.steps = 4;
  config.train.batch = 1;
  config.train.schedule = ScheduleKind::kConstant;
  config.parallel.prefetch = 0;  // so that forward waits for the peer's part
  std::vector<StepRecord> steps;
  comm::run_ranks(static_cast<int>(config.parallel.ranks), {}, [&](comm::ProcessGroup& world) {
    SlowWork listener(slow.work);
    const bool listens = slow.work != "nothing";
    const Stream compute =
        Stream::cuda("compute", world.rank(), {.listener = listens ? &listener : nullptr});
    listener.stream = &compute;
    engine::Parameter w{.name = "w", .shape = {4, 1}, .init = engine::Init::ones()};
    engine::Block block{"block", {&w}};
    Trainer trainer(world, compute, config, {&block}, nullptr, nullptr);
    if (world.rank() == 0) trainer.on_step([&](const StepRecord& r) { steps.push_back(r); });
    const auto fill = [&](std::int64_t, const Batch& host) {
      if (slow.loader) sleep_slowly();
      for (float& x : host[0].span<float>()) x = 0.5f;
    };
    const auto loss = [&](std::int64_t, const Batch& batch) {
      if (world.rank() == slow.gpu_of_loss) SlowWork::hold_up(compute);
      engine::Tape& tape = trainer.tape();
      return tape.region(block, [&] { return ops::linear(tape, batch[0], w, nullptr); });
    };
    trainer.run({{{"x", {1, 4}, DType::kF32}}, fill}, loss, nullptr, 1);
  });
  return steps;
}

TrainConfig ranks(std::int64_t count) {
  TrainConfig config;
  config.parallel.ranks = count;
  return config;
}

/// All parts are known, none is negative, and together they are the step.
void expect_whole(const StepRecord& r) {
  ASSERT_TRUE(r.compute_ms && r.optimizer_ms && r.other_ms());
  for (const double ms : {r.exposed_comm_ms, r.data_ms}) EXPECT_GE(ms, 0);
  for (const double ms : {*r.compute_ms, *r.optimizer_ms}) EXPECT_GT(ms, 0);
  EXPECT_GE(*r.other_ms(), -1e-6);
  EXPECT_LE(r.exposed_comm_ms + r.data_ms + *r.compute_ms + *r.optimizer_ms, r.step_ms + 1e-6);
}

TEST(EmulatedParts, AreKnownAndMakeUpTheStep) {
  for (const std::int64_t count : {1, 2}) {
    TrainConfig config = ranks(count);
    config.cuda.graph = GraphChoice::kOff;
    const std::vector<StepRecord> steps = run({}, config);
    ASSERT_EQ(steps.size(), 4u);
    for (const StepRecord& r : steps) expect_whole(r);
  }
}

TEST(EmulatedParts, SlowWorkIsFoundWhereItIs) {
  struct Case {
    Slow slow;
    double data, compute, exposed, optimizer;  // times kSlowMs
  };
  const std::vector<Case> cases = {
      {{.work = "optimizer"}, 0, 0, 0, 1},   {{.work = "linear.backward_w"}, 0, kAccum, 0, 0},
      {{.gpu_of_loss = 0}, 0, kAccum, 0, 0}, {{.gpu_of_loss = 1}, 0, 0, kAccum, 0},  // the peer's
      {{.loader = true}, 1, 0, 0, 0},  // at least: it fills one batch during the other work
  };
  for (const Case& c : cases) {
    const std::vector<StepRecord> steps = run(c.slow, ranks(2));
    ASSERT_EQ(steps.size(), 4u);
    // Of the first step a batch is there before it starts.
    for (std::size_t i = 1; i < steps.size(); ++i) expect_whole(steps[i]);
    // The least of the others: what is planted is in each of them, what else holds this machine up
    // is not.
    const auto expect = [&](const char* part, double times, const auto& ms_of) {
      double least_ms = ms_of(steps[1]);
      for (std::size_t i = 2; i < steps.size(); ++i) least_ms = std::min(least_ms, ms_of(steps[i]));
      if (times > 0) {
        EXPECT_GE(least_ms, 0.9 * times * kSlowMs) << c.slow.work << ": " << part;
      } else {
        EXPECT_LT(least_ms, 0.9 * kSlowMs) << c.slow.work << ": " << part;
      }
    };
    expect("data", c.data, [](const StepRecord& r) { return r.data_ms; });
    expect("compute", c.compute, [](const StepRecord& r) { return *r.compute_ms; });
    expect("exposed", c.exposed, [](const StepRecord& r) { return r.exposed_comm_ms; });
    expect("optimizer", c.optimizer, [](const StepRecord& r) { return *r.optimizer_ms; });
  }
}

// Neither is told apart inside a graph, and an update during backward has no time of its own.
TEST(EmulatedParts, WhatCannotBeToldApartIsNotKnown) {
  TrainConfig graph = ranks(1);
  graph.cuda.graph = GraphChoice::kOn;
  for (const StepRecord& r : run({.loader = true}, graph)) {
    const bool is_graph = r.step > kStepsBeforeGraph;
    EXPECT_EQ(r.compute_ms.has_value(), !is_graph);
    EXPECT_EQ(r.optimizer_ms.has_value(), !is_graph);
    EXPECT_LE(r.exposed_comm_ms + r.data_ms, r.step_ms + 1e-6);
    if (r.step > 1) {
      EXPECT_GE(r.data_ms, 0.9 * kSlowMs);
    }
  }
  TrainConfig overlapping = ranks(2);
  overlapping.train.overlap_optimizer = OverlapOptimizer::kBackward;
  for (const StepRecord& r : run({}, overlapping)) {
    EXPECT_TRUE(r.compute_ms.has_value());
    EXPECT_FALSE(r.optimizer_ms.has_value());
    EXPECT_GE(*r.other_ms(), -1e-6);
  }
}

// However long nobody asks for them.
TEST(EmulatedParts, EventsOfTimesArePassedOnAsTheyAreReached) {
  const cuda_emulation::Live before = cuda_emulation::live();
  {
    const Stream compute = Stream::cuda("compute", 0);
    std::vector<std::shared_ptr<const engine::StreamTime>> times;
    for (int i = 0; i < 100; ++i) {
      times.push_back(compute.time());
      EXPECT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(compute.native())), cudaSuccess);
      EXPECT_LE(cuda_emulation::live().events - before.events, 3);
    }
    compute.synchronize();
    for (std::size_t i = 1; i < times.size(); ++i) {
      EXPECT_TRUE(times[i]->is_known);
      EXPECT_GE(times[i]->ns, times[i - 1]->ns);
    }
    EXPECT_GT(times.back()->ns, 0);
  }
  EXPECT_EQ(cuda_emulation::live(), before);
}

}  // namespace
}  // namespace tessera::tools
