// A vision transformer learns what noisy images show, sharded over two ranks: a bar from left to
// right, one from top to bottom, or, in one of sixteen images, both. Weights of classes make it
// learn what is rare as well.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "ops/losses/weighted_cross_entropy.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "sum_over_ranks.h"
#include "vit.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape, engine::Tensor;

constexpr std::int64_t kBatch = 64, kSide = 16, kClasses = 3;

struct Images {
  Images(const engine::Memory& memory, engine::RandomStream random)
      : pixels(Tensor::zeros(memory, {kBatch, 1, kSide, kSide}, engine::DType::kF32, "pixels")),
        classes(Tensor::zeros(memory, {kBatch}, engine::DType::kI32, "classes")) {
    for (std::int64_t i = 0; i < kBatch; ++i) {
      const std::int32_t shown = classes.span<std::int32_t>()[i] = i % 16 == 0 ? 2 : i % 2;
      const auto row = static_cast<std::int64_t>(kSide * random.uniform(1000000 + 2 * i));
      const auto column = static_cast<std::int64_t>(kSide * random.uniform(1000001 + 2 * i));
      for (std::int64_t at = 0; at < kSide * kSide; ++at) {
        const bool is_bright =
            (at / kSide == row && shown != 1) || (at % kSide == column && shown != 0);
        const std::int64_t pixel = i * kSide * kSide + at;
        pixels.span<float>()[pixel] = (is_bright ? 1.5f : 0) + 0.5f * random.normal(pixel);
      }
    }
  }
  Tensor pixels, classes;
};

// The share of the images of each class that the model knows.
std::array<float, kClasses> recall(comm::ProcessGroup& world, Tape& tape, vit::Model& model) {
  std::array<float, kClasses> known = {}, all = {};
  for (std::uint64_t batch = 0; batch < 4; ++batch) {
    const Images images(tape.memory(), {1000000 + batch, static_cast<std::uint64_t>(world.rank())});
    const Tensor logits = tape.no_grad([&] { return model.logits(tape, images.pixels); });
    for (std::int64_t i = 0; i < kBatch; ++i) {
      const auto row = logits.span<float>().subspan(i * kClasses, kClasses);
      const std::int32_t shown = images.classes.span<std::int32_t>()[i];
      known[shown] += std::ranges::max_element(row) - row.begin() == shown;
      all[shown] += 1;
    }
  }
  known = sum_over_ranks(world, tape, known), all = sum_over_ranks(world, tape, all);
  for (std::int64_t c = 0; c < kClasses; ++c) known[c] /= all[c];
  return known;
}

bool train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  vit::Model model({.channels = 1,
                    .side = kSide,
                    .patch = 4,
                    .width = 32,
                    .heads = 4,
                    .layers = 2,
                    .classes = kClasses});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks, &model.root,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0.01});
  const Tensor class_weights =
      Tensor::from<float>(memory, {kClasses}, std::vector{1.0f, 1.0f, 7.0f}, "class_weights");
  for (std::uint64_t step = 0; step < 300; ++step) {
    const Images images(memory, {step, static_cast<std::uint64_t>(world.rank())});
    fsdp.begin_step();
    tape.backward(ops::weighted_cross_entropy(tape, model.logits(tape, images.pixels),
                                              images.classes, class_weights));
    adam.step(/*lr=*/3e-3, fsdp.finish_step(), /*max_norm=*/1);
  }
  const auto known = recall(world, tape, model);
  if (world.rank() == 0)
    std::printf("known: %.3f of one kind, %.3f of the other, %.3f of both\n", known[0], known[1],
                known[2]);
  return std::ranges::min(known) > 0.9f;
}

int main() {
  std::array<bool, 2> has_learned = {};
  comm::run_ranks(2, {}, [&](auto& world) { has_learned.at(world.rank()) = train(world); });
  return has_learned[0] ? 0 : 1;
}
