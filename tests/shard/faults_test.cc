// Ranks that throw, stop, disagree or are late: every rank gets an error that says who and where,
// the root cause comes out, nothing hangs, no byte is kept, and the next world trains.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/elementwise.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Memory;
using engine::Tensor;
using std::chrono::milliseconds;
using tessera::testing::affine;
using tessera::testing::has;
using tessera::testing::sum;
using tessera::testing::ToyRank;

constexpr std::int64_t kNumel = 300;
constexpr int kRanks = 3;

// Ends the program when a test hangs: a hang would say nothing.
class Watchdog {
 public:
  Watchdog()
      : thread_([](std::stop_token stop) {
          for (int i = 0; i < 400 && !stop.stop_requested(); ++i) {
            std::this_thread::sleep_for(milliseconds(50));
          }
          if (stop.stop_requested()) return;
          std::fputs("a test hangs\n", stderr);
          std::abort();
        }) {}

 private:
  std::jthread thread_;
};

// Where a rank dies.
enum class When { kForward, kBackward, kBetweenSteps };

// One rank and its training loop.
struct Rank : ToyRank {
  Rank(ProcessGroup& world, const FsdpOptions& options)
      : ToyRank(world, options, {.numel = kNumel}), group(world), number(world.rank()) {}

  // `between` runs in the region of the second layer; what it records runs in its backward.
  float step(const std::vector<int>& order = {0, 1, 2},
             const std::function<Tensor(const Tensor&)>& between = {}, bool updates = true) {
    fsdp.begin_step();
    const Tensor batch = input(1.0f + float(number));
    tape.backward(tape.region(model.root, [&] {
      Tensor x = affine(tape, batch, model.scale, nullptr);
      for (const int i : order) {
        auto& l = *model.layers[static_cast<std::size_t>(i)];
        x = tape.region(l.block, [&] {
          const Tensor y = affine(tape, x, l.weight, &l.bias);
          return i == 1 && between ? between(y) : y;
        });
      }
      return sum(tape, affine(tape, x, model.scale, nullptr));
    }));
    const float norm = fsdp.finish_step().value();
    if (updates) optimizer.step(lr, ClipFactor{clip});
    return norm;
  }

  void fail(When when) {
    const auto die = [] { throw std::runtime_error("the data is bad"); };
    if (when == When::kBetweenSteps) die();
    step({0, 1, 2}, [&](const Tensor& x) {
      if (when == When::kForward) die();
      const Tensor y = tape.empty(x.shape(), x.dtype(), "bad");
      engine::cast(y, x);
      tape.record("bad", y, [die](const Tensor&) { die(); });
      return y;
    });
  }

  ProcessGroup& group;
  int number;
  double lr = 1e-3, clip = 1;
  Sgd optimizer{fsdp, {.momentum = 0.9}};
};

struct Outcome {
  std::string root;                   // what run_ranks rethrew
  std::vector<std::string> messages;  // by rank; empty if it ended well
  std::vector<std::int64_t> nbytes;   // by rank, when all is destroyed
  std::chrono::steady_clock::duration elapsed;
};

Outcome run(milliseconds deadline, const FsdpOptions& options,
            const std::function<void(Rank&)>& fn) {
  Outcome outcome{{}, std::vector<std::string>(kRanks), std::vector<std::int64_t>(kRanks), {}};
  const auto begin = std::chrono::steady_clock::now();
  try {
    comm::run_ranks(kRanks, {.deadline = deadline}, [&](ProcessGroup& world) {
      const auto r = static_cast<std::size_t>(world.rank());
      Memory memory;
      try {
        Rank rank(world, options);
        memory = rank.memory;
        fn(rank);
      } catch (const std::exception& error) {
        outcome.messages[r] = error.what();
        outcome.nbytes[r] = memory.stats().total_nbytes;
        throw;
      }
      outcome.nbytes[r] = memory.stats().total_nbytes;
    });
  } catch (const std::exception& error) {
    outcome.root = error.what();
  }
  outcome.elapsed = std::chrono::steady_clock::now() - begin;
  return outcome;
}

constexpr milliseconds kPatient = std::chrono::seconds(60);

class Faults : public ::testing::TestWithParam<const char*> {
 protected:
  FsdpOptions options() const {
    return {.placement = Placement::preset(GetParam()), .delay_seed = 11};
  }

  void expect_everyone_was_told(const Outcome& outcome) {
    for (const std::string& message : outcome.messages) EXPECT_NE(message, "");
    for (const std::int64_t nbytes : outcome.nbytes) EXPECT_EQ(nbytes, 0);
    EXPECT_LT(outcome.elapsed, std::chrono::seconds(10));
  }

  // Whatever happened before, another world in this process works.
  void TearDown() override {
    const Outcome outcome = run(kPatient, options(), [](Rank& rank) {
      for (int i = 0; i < 3; ++i) EXPECT_GT(rank.step(), 0);
    });
    EXPECT_EQ(outcome.root, "");
    for (const std::int64_t nbytes : outcome.nbytes) EXPECT_EQ(nbytes, 0);
  }

 private:
  Watchdog watchdog_;
};

TEST_P(Faults, ARankThatThrowsEndsAllWithItsError) {
  for (const When when : {When::kForward, When::kBackward, When::kBetweenSteps}) {
    const Outcome outcome = run(kPatient, options(), [&](Rank& rank) {
      rank.step();
      if (rank.number == 1) rank.fail(when);
      for (int i = 0; i < 3; ++i) rank.step();
    });
    EXPECT_EQ(outcome.root, "the data is bad");
    EXPECT_EQ(outcome.messages[1], "the data is bad");
    for (const int other : {0, 2}) {
      EXPECT_TRUE(has(outcome.messages[std::size_t(other)], {"[abort] by rank 1"}));
    }
    expect_everyone_was_told(outcome);
  }
}

TEST_P(Faults, AllRanksThrowingAtOnceEnd) {
  const Outcome outcome = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    rank.fail(When::kBackward);
  });
  EXPECT_EQ(outcome.root, "the data is bad");
  expect_everyone_was_told(outcome);
}

TEST_P(Faults, ARankThatCallsAnotherCollectiveIsNamedWithTheOthers) {
  const Outcome outcome = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    if (rank.number == 2) rank.group.barrier("extra");
    rank.step();
  });
  for (const std::string& message : outcome.messages) {
    EXPECT_TRUE(has(message, {"expected rank ", "got rank ", "rank 2's barrier 'extra'"}));
  }
  EXPECT_TRUE(has(outcome.root, {"rank 2's "}));
  expect_everyone_was_told(outcome);
}

// One step of two micro-steps, in which each layer runs once.
void step_of_two(Rank& rank, const MicroStep& first, int num_backwards = 1) {
  const auto pass = [&] {
    for (int i = 0; i < num_backwards; ++i) {
      const Tensor x = rank.input();
      rank.tape.backward(rank.tape.region(rank.model.root, [&] {
        return sum(rank.tape, affine(rank.tape, x, rank.model.scale, nullptr));
      }));
    }
  };
  rank.fsdp.begin_step(2, first);
  pass();
  rank.fsdp.next_micro_step({.num_backwards = num_backwards});
  pass();
  rank.fsdp.finish_step().value();
  rank.optimizer.step(1e-3);
}

TEST_P(Faults, RanksThatGiveAMicroStepOtherOptionsAreToldAtOnce) {
  const Outcome no_sync = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    step_of_two(rank, {.no_sync = rank.number == 1});
    rank.step();
  });
  for (const std::string& message : no_sync.messages) {
    EXPECT_TRUE(has(message, {"rank 1's micro-step 1 of 2, no_sync true", "no_sync false"}));
  }
  expect_everyone_was_told(no_sync);

  const Outcome backwards = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    step_of_two(rank, {.num_backwards = rank.number == 2 ? 2 : 1}, rank.number == 2 ? 2 : 1);
    rank.step();
  });
  for (const std::string& message : backwards.messages) {
    EXPECT_TRUE(has(message, {"rank 2's micro-step 1 of 2", "1 backward", "2 backwards"}));
    EXPECT_EQ(message.find("1 backwards"), std::string::npos) << message;
  }
  expect_everyone_was_told(backwards);

  const Outcome number = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    if (rank.number == 0) rank.step();
    step_of_two(rank, {});
  });
  for (const std::string& message : number.messages) {
    EXPECT_TRUE(has(message, {"rank 0's micro-step 1 of 1", "micro-step 1 of 2"}));
  }
  expect_everyone_was_told(number);
}

// With whole parameters nothing else would tell: the ranks' models would drift apart.
TEST_P(Faults, RanksThatUpdateDifferentlyAreToldBothSides) {
  const Outcome forgotten = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    rank.step({0, 1, 2}, {}, /*updates=*/rank.number != 1);
    rank.step();
  });
  for (const std::string& message : forgotten.messages) {
    EXPECT_TRUE(has(message, {"rank 1's micro-step 1 of 1", "optimizer step 2, lr 0.001"}));
  }
  expect_everyone_was_told(forgotten);

  const Outcome lr = run(kPatient, options(), [](Rank& rank) {
    rank.lr = rank.number == 2 ? 0.25 : 0.5;
    rank.step();
    rank.step();
  });
  for (const std::string& message : lr.messages) {
    EXPECT_TRUE(has(message, {"rank 2's optimizer step 1, lr 0.25,", "lr 0.5,"}));
  }
  expect_everyone_was_told(lr);

  const Outcome clip = run(kPatient, options(), [](Rank& rank) {
    rank.clip = rank.number == 1 ? 0.25 : 0.5;
    rank.step();
    rank.step();
  });
  for (const std::string& message : clip.messages) {
    EXPECT_TRUE(has(message, {"rank 1's optimizer step 1", "clip 0.25,", "clip 0.5,"}));
  }
  expect_everyone_was_told(clip);

  for (const auto& [field, text] : {std::pair(&ParameterGroup::lr_scale, "lr x 0.125 decay 0"),
                                    {&ParameterGroup::weight_decay, "lr x 1 decay 0.125"}}) {
    const Outcome group = run(kPatient, options(), [&, field = field](Rank& rank) {
      rank.step();
      if (rank.number == 0) rank.optimizer.group("all").*field = 0.125;
      rank.step();
      rank.step();
    });
    for (const std::string& message : group.messages) {
      EXPECT_TRUE(has(message, {"rank 0's optimizer step 2", text, "lr x 1 decay 0"}));
    }
    expect_everyone_was_told(group);
  }
}

TEST_P(Faults, UnitsOfOneSizeInAnotherOrderAreToldApart) {
  const Outcome outcome = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    rank.step(rank.number == 1 ? std::vector<int>{0, 2, 1} : std::vector<int>{0, 1, 2});
    rank.step();
  });
  for (const std::string& message : outcome.messages) {
    EXPECT_TRUE(has(message, {"rank 1's", "h.1", "h.2"}));
  }
  expect_everyone_was_told(outcome);
}

TEST_P(Faults, ARankThatStopsEarlyIsNamedAtOnce) {
  const Outcome outcome = run(kPatient, options(), [](Rank& rank) {
    rank.step();
    if (rank.number == 0) return;
    rank.step();
    rank.step();
  });
  EXPECT_EQ(outcome.messages[0], "");
  for (const int other : {1, 2}) {
    EXPECT_TRUE(has(outcome.messages[std::size_t(other)], {"rank 0 has left the group"}));
  }
  EXPECT_TRUE(has(outcome.root, {"rank 0 has left the group"}));
  EXPECT_LT(outcome.elapsed, std::chrono::seconds(10));
  for (const std::int64_t nbytes : outcome.nbytes) EXPECT_EQ(nbytes, 0);
}

TEST_P(Faults, ARankThatIsLateIsNamedAtTheDeadline) {
  const milliseconds late(1500);
  const Outcome outcome = run(milliseconds(300), options(), [&](Rank& rank) {
    rank.step();
    if (rank.number == 1) std::this_thread::sleep_for(late);
    rank.step();
  });
  for (const std::string& message : outcome.messages) {
    EXPECT_TRUE(has(message, {"within 300 ms", "rank 1 is missing", "last seen in"}));
  }
  EXPECT_GE(outcome.elapsed, late);
  expect_everyone_was_told(outcome);
}

// Rank 0 dies while the gather that it started ahead waits in its worker for ranks that never come.
TEST_P(Faults, UnwindingWhileACollectiveIsInFlightDoesNotHang) {
  const Outcome outcome = run(kPatient, options(), [](Rank& rank) {
    rank.fsdp.begin_step();
    rank.tape.region(rank.model.root, [&] {
      if (rank.number != 0) {
        std::this_thread::sleep_for(milliseconds(300));
        return rank.tape.use(rank.model.scale);
      }
      return rank.tape.region(rank.model.layers[0]->block,
                              []() -> Tensor { throw std::runtime_error("the data is bad"); });
    });
    rank.group.barrier("never met");
  });
  EXPECT_EQ(outcome.root, "the data is bad");
  expect_everyone_was_told(outcome);
}

TEST_P(Faults, PlansThatDifferEndInOneErrorEverywhere) {
  std::vector<std::string> messages(kRanks);
  EXPECT_THROW(comm::run_ranks(kRanks, {},
                               [&](ProcessGroup& world) {
                                 FsdpOptions mine = options();
                                 mine.seed = world.rank() == 2 ? 5 : 1;
                                 try {
                                   Rank rank(world, mine);
                                 } catch (const engine::InvalidArgument& error) {
                                   messages[std::size_t(world.rank())] = error.what();
                                   throw;
                                 }
                               }),
               engine::InvalidArgument);
  for (const std::string& message : messages) {
    EXPECT_TRUE(has(message, {"[plan]", "rank 0 'seed 1'", "rank 2 'seed 5'"}));
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, Faults, ::testing::Values("zero3", "shard_grad_op", "ddp"));

}  // namespace
}  // namespace tessera::shard
