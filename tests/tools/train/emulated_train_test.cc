// What only the emulated device can count: that a step of training holds up neither host nor GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>

#include "tests/emulator/control.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"
#include "tests/tools/testing/gpt_run.h"

namespace tessera::tools {
namespace {

using cuda_emulation::Calls;
using cuda_emulation::Live;

constexpr GptConfig kModel = {.layers = 2, .heads = 2, .dim = 16, .seq = 8, .vocab = 32};
constexpr std::int64_t kRanks = 2;

Calls train(std::int64_t steps, const char* strategy, BackendChoice backend,
            const OffloadConfig& offload = {}, const CommConfig& comm = {},
            const GptConfig& model = kModel, std::int64_t ranks = kRanks) {
  const testing::TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("text.txt", std::string(500, '\7'))),
                          {.seq = model.seq, .vocab = model.vocab});
  TrainConfig config;
  config.device = DeviceChoice::kCuda;
  config.parallel.ranks = ranks;
  config.parallel.backend = backend;
  config.parallel.strategy = strategy;
  config.offload = offload;
  config.comm = comm;
  config.train.steps = steps;
  config.train.accum = 2;
  config.train.batch = 1;
  config.train.lr = 1e-3;
  config.train.schedule = ScheduleKind::kConstant;
  cuda_emulation::start_counting();
  testing::run_gpt(config, model, data, "", nullptr, [](int rank) {
    cuda_emulation::label_thread(fmt::format("rank {}", rank));
    return nullptr;
  });
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

// The two steps before are launched by the host.
TEST(EmulatedTraining, AStepThatIsAGraphIsOneLaunch) {
  for (const char* strategy : {"zero3", "ddp"}) {
    const auto calls_of = [&](std::int64_t steps) {
      return train(steps, strategy, BackendChoice::kThreads, {}, {}, kModel, 1);
    };
    const Calls two = calls_of(2), few = calls_of(6), many = calls_of(10);
    EXPECT_EQ(two.graph_launches, 0);
    EXPECT_EQ(few.graph_launches, 4);
    EXPECT_EQ(many.graph_launches, 8);
    EXPECT_EQ(many.blocking - few.blocking, 2 * 4);
    EXPECT_EQ(many.mallocs, few.mallocs);
    // The number of samples, the rates, and the signal to stop.
    EXPECT_EQ(many.launches - few.launches, 3 * 4);
    EXPECT_GT(two.launches, 2 * 20 * 3);
    EXPECT_EQ(cuda_emulation::live(), Live()) << strategy << ": something was left";
  }
}

// A rank's GPU is its thread's from the first call on, and kernels of large heads are given their
// shared memory once.
TEST(EmulatedTraining, AStepSetsNothingThatIsSet) {
  constexpr GptConfig kLargeHead = {.layers = 2, .heads = 1, .dim = 128, .seq = 8, .vocab = 32};
  const auto calls_of = [&](std::int64_t steps) {
    return train(steps, "zero3", BackendChoice::kThreads, {}, {}, kLargeHead);
  };
  const Calls few = calls_of(2), many = calls_of(4);
  EXPECT_EQ(many.set_devices, few.set_devices);
  EXPECT_GT(few.set_attributes, 0);
  EXPECT_EQ(many.set_attributes, few.set_attributes);
}

// By thread: those of ranks launch.
struct BlockingCalls {
  std::map<std::string, std::int64_t> of_ranks;
  std::int64_t of_others = 0;
};

BlockingCalls blocking_calls() {
  BlockingCalls calls;
  for (const auto& [thread, count] : cuda_emulation::blocking_calls()) {
    if (thread.starts_with("rank ")) {
      calls.of_ranks[thread] = count;
    } else {
      calls.of_others += count;
    }
  }
  return calls;
}

// Ranks wait for the loss and the norm of the step before, as without offload. The threads of the
// host that update wait for the GPU, but not by calls of CUDA (cuda_host_events.h). And of memory
// pinned memory above all: to ask for it in a step would stop the GPU.
TEST(EmulatedTraining, AStepThatOffloadsAsksForNoMemoryAndHoldsUpNoRank) {
  constexpr OffloadConfig kSome{
      .parameters = 0.6, .gradients = 0.8, .optimizer = 0.4, .threads = 2};
  constexpr OffloadConfig kAll{.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 1};
  struct Case {
    BackendChoice backend;
    OffloadConfig offload;
  };
  constexpr std::int64_t kSteps = 4;
  for (const auto& [backend, offload] :
       {Case{BackendChoice::kThreads, {}}, Case{BackendChoice::kThreads, kSome},
        Case{BackendChoice::kThreads, kAll}, Case{BackendChoice::kNccl, kSome}}) {
    const Calls few = train(kSteps, "zero3", backend, offload);
    const BlockingCalls few_blocking = blocking_calls();
    const Calls many = train(2 * kSteps, "zero3", backend, offload);
    const BlockingCalls many_blocking = blocking_calls();
    const std::string what = fmt::format(
        "{}, offload {}", backend == BackendChoice::kNccl ? "nccl" : "threads", offload.parameters);
    EXPECT_EQ(few_blocking.of_ranks.size(), static_cast<std::size_t>(kRanks)) << what;
    for (const auto& [rank, count] : many_blocking.of_ranks) {
      EXPECT_EQ(count - few_blocking.of_ranks.at(rank), 2 * kSteps) << what << ": " << rank;
    }
    EXPECT_EQ(many_blocking.of_others, few_blocking.of_others) << what;
    EXPECT_EQ(many.mallocs, few.mallocs) << what;
    EXPECT_EQ(cuda_emulation::live(), Live()) << what << ": something was left";
  }
}

TEST(EmulatedTraining, PinnedMemoryThatRunsOutIsNamed) {
  constexpr OffloadConfig kOffload{.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 1};
  const cuda_emulation::Settings before = cuda_emulation::settings();
  cuda_emulation::Settings little = before;
  for (const std::size_t nbytes : {0, 20'000, 40'000}) {
    little.pinned_nbytes = nbytes;
    cuda_emulation::configure(little);
    const std::string message = testing::error_of<engine::DeviceError>(
        [&] { train(1, "zero3", BackendChoice::kThreads, kOffload); });
    EXPECT_TRUE(testing::has(message, {"expected", "bytes for", "pinned"})) << message;
    EXPECT_EQ(cuda_emulation::live(), Live()) << "something was left";
  }
  cuda_emulation::configure(before);
  train(1, "zero3", BackendChoice::kThreads, kOffload);
}

TEST(EmulatedTraining, CommunicationHooksWaitForNothingMore) {
  for (const std::string hook : {"bf16", "f16", "f16+powersgd", "batched_powersgd"}) {
    if (testing::kIsSlow && hook != "f16+powersgd") continue;
    for (const bool offloads : {false, true}) {
      CommConfig comm{.hook = hook};
      comm.powersgd.start_step = 1;
      comm.powersgd.offload_error = offloads;
      constexpr std::int64_t kSteps = 4;
      const Calls few = train(kSteps, "zero3", BackendChoice::kThreads, {}, comm);
      const Calls many = train(2 * kSteps, "zero3", BackendChoice::kThreads, {}, comm);
      EXPECT_EQ(many.blocking - few.blocking, 2 * kSteps * kRanks) << hook;
      EXPECT_EQ(many.mallocs, few.mallocs) << hook;
      EXPECT_EQ(cuda_emulation::live(), Live()) << hook << ": something was left";
    }
  }
}

}  // namespace
}  // namespace tessera::tools
