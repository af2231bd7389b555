// Training on inputs that were moved against the model (Goodfellow et al., arXiv:1412.6572), over
// two ranks: a classifier of two half-planes that small steps do not fool.
#include <cmath>
#include <cstdio>

#include "comm/threads.h"
#include "mlp.h"
#include "ops/cross_entropy.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tensor;

constexpr std::int64_t kBatch = 64;
constexpr float kStep = 0.1f;  // how far an input is moved in each direction

// Points of the plane, and whether they are above a wave. With a gap, so that moved points are
// still of their side.
void draw(const engine::RandomStream& random, const Tensor& x, const Tensor& side) {
  for (std::size_t i = 0; i < kBatch; ++i) {
    const float left = 4 * random.uniform(2 * i) - 2, up = random.uniform(2 * i + 1);
    side.span<std::int32_t>()[i] = up < 0.5f ? 0 : 1;
    x.span<float>()[2 * i] = left;
    x.span<float>()[2 * i + 1] = 0.5f * std::sin(2 * left) + (up < 0.5f ? up - 0.75f : up + 0.25f);
  }
}

float train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Mlp model("mlp", {2, 32, 2});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks(), nullptr,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW optimizer(fsdp, {.weight_decay = 0.01});
  float loss = 0;
  for (std::uint64_t step = 0; step < 400; ++step) {
    const Tensor x = tape.empty({kBatch, 2}, engine::DType::kF32, "x");
    const Tensor side = tape.empty({kBatch}, engine::DType::kI32, "side");
    draw({step, static_cast<std::uint64_t>(world.rank())}, x, side);
    const auto loss_at = [&](const Tensor& input) {
      return ops::cross_entropy(tape, model(tape, input), side);
    };

    // Where the loss grows: the gradient of the input alone, of this rank's own loss.
    fsdp.begin_step();
    tape.watch(x);
    tape.backward(tape.frozen([&] { return loss_at(x); }));
    const Tensor dx = tape.grad(x);
    const Tensor moved = tape.empty(x.shape(), x.dtype(), "moved");
    for (std::size_t i = 0; i < 2 * kBatch; ++i)
      moved.span<float>()[i] = x.span<float>()[i] + std::copysign(kStep, dx.span<float>()[i]);

    const Tensor mean = loss_at(moved);
    tape.backward(mean);
    fsdp.finish_step();
    optimizer.step(/*lr=*/1e-2);
    loss = mean.item();
    if (world.rank() == 0 && step % 100 == 0) std::printf("step %3lu loss %.4f\n", step, loss);
  }
  return loss;
}

int main() {
  float loss = 0;
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    const float mine = train(world);
    if (world.rank() == 0) loss = mine;
  });
  std::printf("final loss at moved inputs %.4f\n", loss);
  return loss < 0.2f ? 0 : 1;
}
