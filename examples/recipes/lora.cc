// Fine-tuning with low-rank adapters (Hu et al., arXiv:2106.09685) over two ranks: a base that has
// learned to count by 1 is frozen, and its adapters learn to count by 3. The loss is a mean over
// the tokens that a mask leaves, of which one rank has more than the other.
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "comm/threads.h"
#include "lora.h"
#include "ops/cross_entropy.h"
#include "ops/mul.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "sum_over_ranks.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::DType, engine::Tape, engine::Tensor;

constexpr std::int64_t kVocab = 16, kSequences = 8, kTokens = 12, kPrompt = 2;

// This rank's part of the loss of a step, whose sequences count by `by` and get shorter and
// shorter. The mask leaves out prompts and padding; targets there would teach something else.
Tensor loss(comm::ProcessGroup& world, Tape& tape, lora::Model& model, std::uint64_t step, int by) {
  const std::int64_t rows = kSequences / world.size();
  const Tensor tokens = Tensor::zeros(tape.memory(), {rows, kTokens}, DType::kI32, "tokens");
  const Tensor targets = Tensor::zeros(tape.memory(), {rows, kTokens}, DType::kI32, "targets");
  const Tensor mask = Tensor::zeros(tape.memory(), {rows, kTokens}, DType::kF32, "mask");
  float n = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t sequence = world.rank() * rows + row, length = kTokens - sequence;
    const std::uint32_t start = engine::RandomStream{step}.bits(std::uint64_t(sequence)) % kVocab;
    for (std::int64_t t = 0, i = row * kTokens; t < length; ++t, ++i) {
      tokens.data<std::int32_t>()[i] = static_cast<std::int32_t>((start + by * t) % kVocab);
      targets.data<std::int32_t>()[i] = static_cast<std::int32_t>((start + by * (t + 1)) % kVocab);
      mask.data<float>()[i] = t < kPrompt ? 0 : 1;
      n += mask.data<float>()[i];
    }
  }
  const Tensor losses = ops::cross_entropy_rows(tape, model(tape, tokens), targets);
  // finish_step() takes the mean over the R ranks. To make that the mean over the N tokens that
  // masks leave on all of them, and not the mean of ranks' means, each divides its sum by N / R.
  const auto [N, R] = sum_over_ranks(world, tape, std::array{n, 1.0f});
  return ops::scale(tape, ops::sum(tape, ops::mul(tape, losses, mask)), R / N);
}

struct Result {
  float norm;           // of the first gradient
  float before, after;  // mean losses of the frozen base, without and with what adapters learned
};

Result train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  lora::Model model(kVocab, /*width=*/32);
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks(), nullptr,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0});
  Result result = {};
  const auto steps = [&](std::uint64_t begin, std::uint64_t end, int by) {
    for (std::uint64_t step = begin; step < end; ++step) {
      fsdp.begin_step();
      tape.backward(loss(world, tape, model, step, by));
      const shard::GradNorm norm = fsdp.finish_step();
      if (step == 0) result.norm = norm.value();
      adam.step(/*lr=*/1e-2, norm, /*max_norm=*/1);
    }
    const Tensor mine = tape.no_grad([&] { return loss(world, tape, model, 1000, /*by=*/3); });
    const auto [sum, R] = sum_over_ranks(world, tape, std::array{mine.item(), 1.0f});
    return sum / R;
  };
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
  std::array<Result, 2> of_two;
  Result one;
  comm::run_ranks(2, {}, [&](auto& world) { of_two.at(world.rank()) = train(world); });
  comm::run_ranks(1, {}, [&](auto& world) { one = train(world); });
  const auto [norm, before, after] = of_two[0];
  std::printf("loss of the base %.3f, with its adapters %.4f\n", before, after);
  std::printf("norm of the first gradient %.7f, as one rank has it %.7f\n", norm, one.norm);
  // One rank adds in another order than two do, which may change the last bits.
  return std::abs(norm - one.norm) < 1e-5f * one.norm && before > 1 && after < 0.01f ? 0 : 1;
}
