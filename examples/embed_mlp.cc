// Embedding Tessera: a model of one's own, wrapped, trained fully sharded over four ranks.
// The task: which of three spiral arms does a point of the plane lie on?
#include <cmath>
#include <cstdio>
#include <deque>
#include <vector>

#include "comm/threads.h"
#include "engine/tape.h"
#include "ops/cross_entropy.h"
#include "ops/gelu.h"
#include "ops/linear.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tensor;

// A model is parameters, grouped into blocks, and a function that runs each block as a region.
class Mlp {
 public:
  Mlp() {
    const std::vector<std::int64_t> sizes = {2, 64, 64, 3};
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
      layers_.emplace_back("fc" + std::to_string(i), sizes[i], sizes[i + 1]);
    }
  }

  std::vector<engine::Block*> blocks() {
    std::vector<engine::Block*> all;
    for (Layer& layer : layers_) all.push_back(&layer.block);
    return all;
  }

  // x (N, 2), targets (N) -> mean cross-entropy.
  Tensor loss(engine::Tape& tape, Tensor x, const Tensor& targets) {
    for (Layer& layer : layers_) {
      x = tape.region(layer.block, [&] {
        const Tensor y = ops::linear(tape, x, layer.weight, &layer.bias);
        return &layer == &layers_.back() ? y : ops::gelu(tape, y);
      });
    }
    return ops::cross_entropy(tape, x, targets);
  }

 private:
  struct Layer {
    Layer(const std::string& name, std::int64_t in, std::int64_t out)
        : weight{name + ".weight", {in, out}, engine::Init::normal(0.3f)},
          bias{name + ".bias", {out}},
          block{name, {&weight, &bias}} {}

    engine::Parameter weight, bias;
    engine::Block block;
  };
  std::deque<Layer> layers_;  // parameters do not move
};

float train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Mlp model;
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks(), /*root=*/nullptr,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW optimizer(fsdp, {.weight_decay = 0.01});
  constexpr std::int64_t kBatch = 64;
  float loss = 0;
  for (std::uint64_t step = 0; step < 600; ++step) {
    const Tensor x = tape.empty({kBatch, 2}, engine::DType::kF32, "x");
    const Tensor arm = tape.empty({kBatch}, engine::DType::kI32, "arm");
    const engine::RandomStream random{step, static_cast<std::uint64_t>(world.rank())};
    for (std::int64_t i = 0; i < kBatch; ++i) {
      const float radius = random.uniform(static_cast<std::uint64_t>(i));
      arm.data<std::int32_t>()[i] = static_cast<std::int32_t>(i % 3);
      const float angle = 5 * radius + 2.0944f * static_cast<float>(i % 3);
      x.data<float>()[2 * i] = radius * std::cos(angle);
      x.data<float>()[2 * i + 1] = radius * std::sin(angle);
    }
    fsdp.begin_step();
    const Tensor mean = model.loss(tape, x, arm);
    tape.backward(mean);
    optimizer.step(/*lr=*/5e-3, fsdp.finish_step(), /*max_norm=*/1);
    loss = mean.item();  // this rank's own: gradients are means over ranks, losses are not
    if (world.rank() == 0 && step % 100 == 0) std::printf("step %3lu loss %.4f\n", step, loss);
  }
  return loss;
}

int main() {
  float loss = 0;
  comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) {
    const float mine = train(world);
    if (world.rank() == 0) loss = mine;
  });
  std::printf("final loss %.4f\n", loss);
  return loss < 0.2f ? 0 : 1;
}
