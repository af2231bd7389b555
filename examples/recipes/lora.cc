// Fine-tuning with low-rank adapters (Hu et al., arXiv:2106.09685) over two ranks: a base that has
// learned to count by 1 is frozen, and its adapters learn to count by 3.
#include <array>
#include <cstdio>
#include <vector>

#include "comm/threads.h"
#include "lora.h"
#include "ops/cross_entropy.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape, engine::Tensor;

constexpr std::int64_t kVocab = 16, kBatch = 64;

// Of tokens that are drawn, to each of which the token that is `by` more is to follow.
Tensor loss(Tape& tape, lora::Model& model, engine::RandomStream random, std::uint32_t by) {
  std::vector<std::int32_t> tokens, targets;
  for (std::uint64_t i = 0; i < kBatch; ++i) {
    const std::uint32_t token = random.bits(i) % kVocab;
    tokens.push_back(std::int32_t(token));
    targets.push_back(std::int32_t((token + by) % kVocab));
  }
  const auto tensor = [&](const std::vector<std::int32_t>& values) {
    return Tensor::from<std::int32_t>(tape.memory(), {kBatch}, values, "tokens");
  };
  return ops::cross_entropy(tape, model(tape, tensor(tokens)), tensor(targets));
}

struct Result {
  float before, after;  // losses of the frozen base, without and with what its adapters learned
};

Result train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  lora::Model model(kVocab, /*width=*/32);
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks(), nullptr,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0});
  const auto steps = [&](std::uint64_t begin, std::uint64_t end, std::uint32_t by) {
    for (std::uint64_t step = begin; step < end; ++step) {
      fsdp.begin_step();
      tape.backward(loss(tape, model, {step, std::uint64_t(world.rank())}, by));
      adam.step(/*lr=*/1e-2, fsdp.finish_step(), /*max_norm=*/1);
    }
    return tape.no_grad([&] { return loss(tape, model, {/*seed=*/1000000}, /*by=*/3); }).item();
  };
  Result result = {};
  result.before = steps(0, 200, /*by=*/1);
  model.freeze_base();
  fsdp.trainable_changed();
  std::vector<std::vector<float>> base;
  for (const auto* p : model.base()) base.push_back(fsdp.full_parameter(*p));
  result.after = steps(200, 500, /*by=*/3);
  for (std::size_t i = 0; i < base.size(); ++i) {
    const auto& p = *model.base()[i];
    engine::require(fsdp.full_parameter(p) == base[i], "[lora] expected {} as it was", p.name);
  }
  return result;
}

int main() {
  std::array<Result, 2> of_ranks;
  comm::run_ranks(2, {}, [&](auto& world) { of_ranks.at(world.rank()) = train(world); });
  const auto [before, after] = of_ranks[0];
  std::printf("loss of the base %.3f, with its adapters %.4f\n", before, after);
  return before > 1 && after < 0.01f ? 0 : 1;
}
