// Page-locked memory that runs out, at every place that asks for some: the error says how much was
// wanted, nothing is lost, and the process goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "tests/emulator/control.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using cuda_emulation::Live;
using testing::Training;

constexpr int kForGood = 1'000'000;  // memory gives back what it keeps and tries once more
constexpr int kCulprit = 1;          // the rank, and its GPU

Training training() {
  Training run{.ranks = 2,
               .steps = 2,
               .blocks = 2,
               .numel = 70,
               .adamw = true,
               .max_norm = 1,
               .poison = true,
               .num_gpus = 2};
  run.options.placement = Placement::preset("zero3");
  run.options.precision.param = engine::DType::kBF16;
  run.options.offload = {.parameters = 1, .gradients = 1, .optimizer = 0.5, .threads = 2};
  return run;
}

class PinnedFaults : public ::testing::Test {
 protected:
  PinnedFaults() { cuda_emulation::reset(); }
  ~PinnedFaults() override { cuda_emulation::reset(); }
};

// Breaks the nth allocation of `run`, which plans it with the function that it is given, for every
// n until there is no nth. Returns how many there are.
int break_each(const std::function<void(const std::function<void()>& plan)>& run) {
  const std::vector<float> expected = train(training());
  constexpr int kStride = testing::kIsSlow ? 5 : 1;
  for (int nth = 1;; nth += kStride) {
    const Live before = cuda_emulation::live();
    std::string message;
    try {
      run([nth] { cuda_emulation::fail_pinned(kCulprit, nth, kForGood); });
    } catch (const engine::DeviceError& error) {
      message = error.what();
    }
    cuda_emulation::reset();
    const Live after = cuda_emulation::live();
    EXPECT_EQ(after.allocated_nbytes, before.allocated_nbytes);
    EXPECT_EQ(after.pinned_nbytes, before.pinned_nbytes);
    EXPECT_EQ(after.streams, before.streams);
    EXPECT_EQ(after.events, before.events);
    if (nth % 4 == 1) {
      EXPECT_TRUE(train(training()) == expected) << "number " << nth;
    }
    if (message.empty()) return nth - 1;
    EXPECT_THAT(message,
                ::testing::ContainsRegex("expected [1-9][0-9]* bytes.*(pinned|page-locked)"));
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "number " << nth;
      return nth;
    }
  }
}

TEST_F(PinnedFaults, WhileAllIsMadeAreNamed) {
  const int num = break_each([](const std::function<void()>& plan) {
    plan();
    train(training());
  });
  EXPECT_GT(num, 8);
}

TEST_F(PinnedFaults, InAStepAreNamed) {
  const int num = break_each([](const std::function<void()>& plan) {
    Training run = training();
    run.before_step = [&](comm::ProcessGroup& world, int step) {
      if (step == 0 && world.rank() == kCulprit) plan();
      return true;
    };
    train(run);
  });
  EXPECT_GT(num, 1);
}

// Units are laid out again in the middle of training.
TEST_F(PinnedFaults, OfUnitsThatAreCutAnewAreNamed) {
  const int num = break_each([](const std::function<void()>& plan) {
    const Training run = training();
    comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& world) {
      const engine::Stream compute = run.compute(world.rank());
      const engine::Memory memory(compute, {.poison = true});
      engine::Tape tape(memory, compute);
      testing::ToyModel model(run.blocks, run.numel);
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, run.options);
      AdamW adamw(fsdp, {});
      for (int step = 0; step < 2; ++step) {
        if (step == 1) {
          model.layers[0]->weight.trainable = false;
          world.barrier("planned");
          if (world.rank() == kCulprit) plan();
          fsdp.trainable_changed();
        }
        fsdp.begin_step();
        tape.backward(
            model.loss(tape, engine::Tensor::zeros(memory, {run.numel}, engine::DType::kF32)));
        adamw.step(1e-3, fsdp.finish_step(), 1);
      }
      fsdp.synchronize();
      world.barrier("end");
    });
  });
  EXPECT_GE(num, 3);
}

// What a run holds of page-locked memory is what its books say and a grain for each block: of 256
// bytes, from 64 KiB on of 4 KiB. Flags by which GPUs wait for the host are the blocks of 4 KiB
// that no book knows.
TEST_F(PinnedFaults, BytesThatAreHeldAreThoseOfTheBooks) {
  for (const std::int64_t numel : {300, 40'000}) {
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      const Live before = cuda_emulation::live();
      Training run = training();
      const engine::Stream compute = run.compute(0);
      const engine::Memory memory(compute);
      engine::Tape tape(memory, compute);
      testing::ToyModel model(3, numel);
      Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, run.options);
      AdamW adamw(fsdp, {});
      for (int step = 0; step < 3; ++step) {
        fsdp.begin_step();
        tape.backward(
            model.loss(tape, engine::Tensor::zeros(memory, {numel}, engine::DType::kF32)));
        adamw.step(1e-3, fsdp.finish_step(), 1);
      }
      fsdp.synchronize();
      const Live now = cuda_emulation::live();
      const std::int64_t held = now.pinned_nbytes - before.pinned_nbytes;
      const std::int64_t blocks = now.pinned - before.pinned;
      const std::int64_t books = fsdp.host_memory().stats().total_nbytes;
      EXPECT_GE(books, 3 * (4 + 4 + 4) * numel);  // masters, sums and a half of two states
      EXPECT_GE(held, books);
      EXPECT_LE(held, books + 4096 * blocks);
    });
  }
}

}  // namespace
}  // namespace tessera::shard
