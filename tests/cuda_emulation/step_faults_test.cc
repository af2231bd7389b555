// What ranks are told when something breaks in a step of training on GPUs, and what is left then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl.h"
#include "comm/threads.h"
#include "tests/emulator/control.h"
#include "tests/emulator/nccl_control.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using cuda_emulation::Live;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::Training;

// For what must end at once, as it is known then, and for what only the deadline can tell.
constexpr milliseconds kPatient = std::chrono::seconds(30);
constexpr milliseconds kAtOnce = std::chrono::seconds(10);
constexpr milliseconds kDeadline = std::chrono::seconds(1);
constexpr int kSteps = 2;
constexpr int kCulprit = 1;  // the rank, and where each has one, its GPU

using RankFn = std::function<void(ProcessGroup&)>;

struct Backend {
  std::string name;
  int ranks;
  int num_gpus;
  std::string strategy;
  std::function<void(int ranks, milliseconds deadline, const RankFn&)> run;

  bool share_gpu() const { return num_gpus == 1; }
  int gpu() const { return share_gpu() ? 0 : kCulprit; }
};

struct Outcome {
  std::string cause;                  // what the world rethrew
  std::vector<std::string> messages;  // by rank
  std::string fault = {};             // what broke the culprit's GPU
};

class StepFaults : public ::testing::TestWithParam<Backend> {
 protected:
  StepFaults() { reset(); }
  ~StepFaults() override { reset(); }

  // Whatever happened before, another world in this process works.
  void TearDown() override {
    const Outcome outcome = run(training(), kPatient);
    EXPECT_EQ(outcome.cause, "");
  }

  static void reset() {
    cuda_emulation::reset();
    cuda_emulation::reset_nccl();
  }

  static Training training() {
    return {.ranks = GetParam().ranks,
            .steps = kSteps,
            .blocks = 2,
            .numel = 70,
            .adamw = true,
            .max_norm = 1,
            .poison = true,
            .options = {.placement = Placement::preset(GetParam().strategy)},
            .num_gpus = GetParam().num_gpus};
  }

  // `plan` before step `step` on the culprit's thread.
  static Training training(int step, std::function<void()> plan) {
    Training run = training();
    run.before_step = [=](ProcessGroup& world, int s) {
      if (s == step && world.rank() == kCulprit) plan();
      return true;
    };
    return run;
  }

  // Trains; nobody leaves before all are done. Then nothing may be left.
  Outcome run(const Training& training, milliseconds deadline) {
    const Live before = cuda_emulation::live();
    const auto begin = std::chrono::steady_clock::now();
    Outcome outcome{"", std::vector<std::string>(static_cast<std::size_t>(training.ranks))};
    try {
      GetParam().run(training.ranks, deadline, [&](ProcessGroup& world) {
        try {
          if (!train_rank(world, training).empty()) world.barrier("end");
        } catch (const std::exception& error) {
          outcome.messages[static_cast<std::size_t>(world.rank())] = error.what();
          throw;
        }
      });
    } catch (const std::exception& error) {
      outcome.cause = error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kAtOnce);
    outcome.fault = cuda_emulation::fault(GetParam().gpu());
    reset();
    const Live after = cuda_emulation::live();
    EXPECT_EQ(after.allocations, before.allocations);
    EXPECT_EQ(after.allocated_nbytes, before.allocated_nbytes);
    EXPECT_EQ(after.pinned, before.pinned);
    EXPECT_EQ(after.streams, before.streams);
    EXPECT_EQ(after.events, before.events);
    EXPECT_EQ(cuda_emulation::live_communicators(), 0);
    return outcome;
  }

  // Every rank ended with an error, which says which rank or GPU failed.
  static void expect_all_named_the_culprit(const Outcome& outcome) {
    const auto culprit = GetParam().share_gpu() ? ContainsRegex("cuda:0|rank [0-9]")
                                                : ContainsRegex("cuda:1|rank 1");
    EXPECT_THAT(outcome.messages, Each(culprit));
    EXPECT_THAT(outcome.cause, culprit);
    EXPECT_THAT(outcome.messages, ::testing::Contains(outcome.cause));
  }

  // Breaks the nth of something, for every n (under a sanitizer every fourth) until there is no
  // nth, and expects every rank to be told. About how many there are.
  int break_each(const std::function<Training(int nth)>& plan,
                 const ::testing::Matcher<std::string>& cause) {
    constexpr int kStride = testing::kIsSlow ? 4 : 1;
    for (int nth = 1;; nth += kStride) {
      const Outcome outcome = run(plan(nth), kPatient);
      if (outcome.cause.empty()) {
        EXPECT_EQ(outcome.fault, "") << "nobody was told";
        return nth - 1;
      }
      expect_all_named_the_culprit(outcome);
      EXPECT_THAT(outcome.cause, cause);
      if (HasFailure()) {
        ADD_FAILURE() << "number " << nth;
        return nth;
      }
    }
  }
};

void run_threads(int ranks, milliseconds deadline, const RankFn& fn) {
  comm::run_ranks(ranks, {.deadline = deadline}, fn);
}
void run_nccl(int ranks, milliseconds deadline, const RankFn& fn) {
  comm::run_nccl_ranks(ranks, {.deadline = deadline}, fn);
}
void run_fast(int ranks, milliseconds deadline, const RankFn& fn) {
  comm::run_nccl_ranks(ranks, {.deadline = deadline, .canonical = false}, fn);
}

const Backend kOneGpu{"threads_on_one_gpu", 3, 1, "zero3", run_threads};
const Backend kThreads{"threads", 3, 3, "zero3", run_threads};
const Backend kThreadsDdp{"threads_ddp", 2, 2, "ddp", run_threads};
const Backend kNccl{"nccl", 3, 3, "zero3", run_nccl};
const Backend kNcclDdp{"nccl_ddp", 2, 2, "ddp", run_nccl};
const Backend kNcclFast{"nccl_fast", 4, 4, "shard_grad_op", run_fast};

constexpr auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Backends, StepFaults,
                         ::testing::Values(kOneGpu, kThreads, kThreadsDdp, kNccl, kNcclDdp,
                                           kNcclFast),
                         kName);
class NcclStepFaults : public StepFaults {};
INSTANTIATE_TEST_SUITE_P(Backends, NcclStepFaults, ::testing::Values(kNccl, kNcclDdp, kNcclFast),
                         kName);

// "[memory] expected 768 bytes for activation on cuda:1, got none"
const auto kOutOfMemory =
    AllOf(HasSubstr("[memory] expected "), HasSubstr(" bytes for "), HasSubstr(" on cuda:"));

// From the nth on: memory gives back what it keeps and tries once more.
constexpr int kForGood = 1'000'000;

TEST_P(StepFaults, OutOfMemoryWhileAllIsMadeIsToldToAll) {
  const int gpu = GetParam().gpu();
  const int num = break_each(
      [&](int nth) {
        cuda_emulation::fail_malloc(gpu, nth, kForGood);
        return training();
      },
      kOutOfMemory);
  EXPECT_GT(num, 20);
}

TEST_P(StepFaults, OutOfMemoryInAStepIsToldToAll) {
  const int num = break_each(
      [&](int nth) {
        Training run =
            training(1, [nth] { cuda_emulation::fail_malloc(GetParam().gpu(), nth, kForGood); });
        run.cache = false;
        return run;
      },
      kOutOfMemory);
  EXPECT_GT(num, 10);
}

TEST_P(StepFaults, MemoryThatIsShortForAMomentIsNoError) {
  for (const int nth : {1, 5, 9}) {
    cuda_emulation::fail_malloc(GetParam().gpu(), nth);
    EXPECT_EQ(run(training(), kPatient).cause, "");
  }
}

TEST_P(StepFaults, AFailedLaunchInAStepIsToldToAll) {
  const int num = break_each(
      [&](int nth) {
        return training(1, [nth] { cuda_emulation::fail_launch(GetParam().gpu(), nth); });
      },
      AnyOf(HasSubstr("unspecified launch failure"), HasSubstr("unhandled cuda error")));
  EXPECT_GT(num, 15);
}

TEST_P(NcclStepFaults, AnAsynchronousErrorIsToldToAll) {
  const int num = break_each(
      [&](int nth) {
        return training(1, [nth] { cuda_emulation::fail_nccl(kCulprit, nth, ncclRemoteError); });
      },
      AllOf(HasSubstr("rank 1"), HasSubstr("remote process exited")));
  EXPECT_GT(num, 5);
}

TEST_P(NcclStepFaults, ARankThatHangsInACollectiveIsToldByTheDeadline) {
  const Outcome outcome =
      run(training(1, [] { cuda_emulation::silence_nccl(kCulprit, 4); }), kDeadline);
  const auto late = AllOf(HasSubstr("ranks within 1000 ms"),
                          ContainsRegex("'(h.[01]|root) (forward|backward|gradient)"));
  EXPECT_THAT(outcome.messages, Each(late));
  EXPECT_THAT(outcome.cause, late);
}

TEST_P(StepFaults, ARankThatThrowsIsToldToAll) {
  Outcome outcome = run(training(1, [] { throw std::runtime_error("no more data"); }), kPatient);
  EXPECT_EQ(outcome.cause, "no more data");
  EXPECT_EQ(std::exchange(outcome.messages[kCulprit], "[abort] by rank 1"), outcome.cause);
  EXPECT_THAT(outcome.messages, Each(HasSubstr("[abort] by rank 1")));
}

TEST_P(StepFaults, ARankThatNeverComesIsNamedByTheDeadline) {
  Training training = StepFaults::training();
  training.before_step = [](ProcessGroup& world, int step) {
    while (step == 1 && world.rank() == kCulprit) {
      std::this_thread::sleep_for(milliseconds(1));
      world.check();
    }
    return true;
  };
  const Outcome outcome = run(training, kDeadline);
  expect_all_named_the_culprit(outcome);
  EXPECT_THAT(outcome.cause, AllOf(HasSubstr("ranks within 1000 ms"),
                                   HasSubstr("rank 1 is missing, last seen in")));
}

TEST_P(StepFaults, ARankThatLeavesIsNamedToTheOthersAtOnce) {
  Training training = StepFaults::training();
  training.before_step = [](ProcessGroup& world, int step) {
    return step == 0 || world.rank() != kCulprit;
  };
  Outcome outcome = run(training, kPatient);
  EXPECT_EQ(std::exchange(outcome.messages[kCulprit], outcome.cause), "");
  EXPECT_THAT(outcome.messages, Each(HasSubstr("rank 1 has left the group, last seen in")));
}

}  // namespace
}  // namespace tessera::shard
