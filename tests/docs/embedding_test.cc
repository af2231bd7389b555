// docs/embedding.md, line by line: what it shows is this program.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/tape.h"
#include "ops/cross_entropy.h"
#include "ops/gelu.h"
#include "ops/linear.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "tests/docs/shown.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

using engine::Tensor;

struct Model {
  // clang-format off
  engine::Parameter weight = {"fc0.weight", {2, 64}, engine::Init::normal(0.3f)}, bias = {"fc0.bias", {64}};
  // clang-format on
  engine::Block block = {"fc0", {&weight, &bias}};
  bool recomputes = false;

  Tensor loss(engine::Tape& tape, Tensor x, const Tensor& targets) {
    if (recomputes) {
      // clang-format off
      x = tape.region(block, {.recompute = true}, [&](const Tensor& h) { return ops::gelu(tape, ops::linear(tape, h, weight, &bias)); }, x);
      // clang-format on
    } else {
      x = tape.region(block, [&] { return ops::gelu(tape, ops::linear(tape, x, weight, &bias)); });
    }
    return ops::cross_entropy(tape, x, targets);
  }
};

// Returns the step that it went on from, and the loss of the last.
std::pair<std::int64_t, float> train_on(comm::ProcessGroup& world, const std::string& folder) {
  const auto compute = engine::Stream::inline_cpu("compute");
  const engine::Memory memory;
  engine::Tape tape(memory, compute);
  Model model;
  const std::vector<engine::Block*> blocks = {&model.block};
  engine::Block* const root = nullptr;
  // clang-format off
  shard::Fsdp fsdp(world, memory, compute, blocks, root, {.placement = shard::Placement::preset("zero3")});
  // clang-format on
  shard::AdamW optimizer(fsdp, {.weight_decay = 0.01});
  const Tensor x = Tensor::from<float>(memory, {1, 2}, std::vector<float>{1, -1}, "x");
  const Tensor targets =
      Tensor::from<std::int32_t>(memory, {1}, std::vector<std::int32_t>{7}, "targets");
  std::int64_t step = 0;
  const auto step_once = [&] {
    constexpr double lr = 0.01;
    if (const std::int64_t num_targets = step % 2; num_targets == 1) {
      fsdp.begin_step(1, {.weight = num_targets});
    } else {
      fsdp.begin_step();
    }
    model.recomputes = step % 2 == 1;
    const Tensor loss = model.loss(tape, x, targets);
    tape.backward(loss);
    optimizer.step(lr, fsdp.finish_step(), /*max_norm=*/1);
    return loss.item();
  };
  shard::Checkpointer checkpoints(world, {{&fsdp, &optimizer}}, {.folder = folder});
  if (const auto loaded = checkpoints.load_newest()) step = loaded->step;
  const std::int64_t first = step;
  float loss = 0;
  for (; step < first + 3; ++step) loss = step_once();
  checkpoints.save(step, {{"epoch", "3"}});
  checkpoints.wait();
  const Tensor seen = tape.no_grad([&] { return model.loss(tape, x, targets); });
  EXPECT_LT(seen.item(), loss);
  return {first, loss};
}

TEST(EmbeddingPage, TrainsAndGoesOn) {
  const testing::TempFolder folder;
  std::pair<std::int64_t, float> first, second;
  const auto run = [&](std::pair<std::int64_t, float>& result) {
    const auto train = [&](comm::ProcessGroup& world) {
      const auto mine = train_on(world, folder / "checkpoints");
      if (world.rank() == 0) result = mine;
    };
    comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) { train(world); });
  };
  run(first);
  run(second);
  EXPECT_EQ(first.first, 0);
  EXPECT_EQ(second.first, 3);
  EXPECT_LT(second.second, first.second);
}

TEST(EmbeddingPage, ShowsWhatIsHere) {
  testing::expect_shown("docs/embedding.md", "tests/docs/embedding_test.cc", 12);
}

}  // namespace
}  // namespace tessera
