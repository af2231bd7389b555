// Fine-tuning with low-rank adapters (Hu et al., arXiv:2106.09685) over two ranks: a base that has
// learned to count by 1 is frozen, and its adapters learn to count by 3. The loss is a mean over
// the targets that are not masked, of which one rank has more than the other.
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "comm/threads.h"
#include "lora.h"
#include "ops/cross_entropy.h"
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
constexpr std::int32_t kMasked = -100;

// Sequences of a rank, which count by `by` and get shorter and shorter. Targets in prompts and
// padding, which would teach something else, are masked.
struct Batch {
  Batch(const comm::ProcessGroup& world, const engine::Memory& memory, std::uint64_t step, int by)
      : rows(kSequences / world.size()),
        tokens(Tensor::zeros(memory, {rows, kTokens}, DType::kI32, "tokens")),
        targets(Tensor::zeros(memory, {rows, kTokens}, DType::kI32, "targets")) {
    for (std::int64_t i = 0; i < tokens.numel(); ++i) {
      const std::int64_t sequence = world.rank() * rows + i / kTokens, t = i % kTokens;
      const std::uint32_t start = engine::RandomStream{step}.bits(std::uint64_t(sequence)) % kVocab;
      const bool is_masked = t < kPrompt || t >= kTokens - sequence;
      tokens.data<std::int32_t>()[i] = std::int32_t((start + by * t) % kVocab);
      targets.data<std::int32_t>()[i] =
          is_masked ? kMasked : std::int32_t((start + by * (t + 1)) % kVocab);
      num_targets += is_masked ? 0 : 1;
    }
  }
  std::int64_t rows, num_targets = 0;  // those that are not masked
  Tensor tokens, targets;
};

// The sum over the targets that are not masked.
Tensor loss(Tape& tape, lora::Model& model, const Batch& batch) {
  const Tensor logits = model(tape, batch.tokens);
  return ops::sum(tape, ops::cross_entropy_rows(tape, logits, batch.targets, kMasked));
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
      const Batch batch(world, memory, step, by);
      fsdp.begin_step(1, {.weight = batch.num_targets});  // the mean is over those of all ranks
      tape.backward(loss(tape, model, batch));
      const shard::GradNorm norm = fsdp.finish_step();
      if (step == 0) result.norm = norm.value();
      adam.step(/*lr=*/1e-2, norm, /*max_norm=*/1);
    }
    const Batch batch(world, memory, /*step=*/1000, /*by=*/3);
    const float mine = tape.no_grad([&] { return loss(tape, model, batch); }).item();
    const auto [sum, n] =
        sum_over_ranks(world, tape, std::array{mine, static_cast<float>(batch.num_targets)});
    return sum / n;
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
