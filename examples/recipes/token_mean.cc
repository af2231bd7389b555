// A mean over tokens: a small Llama learns to count from sequences of unequal lengths, of which one
// rank has longer ones than the other. Two ranks end with the bits of one process that has all
// batches; a mean of the means of batches, in which tokens of a short one count for more, does not.
#include <array>
#include <cstdio>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "llama.h"
#include "ops/cross_entropy.h"
#include "ops/scale.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "sum_over_ranks.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape, engine::Tensor;

constexpr int kBatches = 2;  // of a step, on all ranks together
constexpr std::int64_t kRows = 4, kTokens = 12, kVocab = 8;
constexpr std::int32_t kMasked = -100;

// Sequences that count, from a token that is drawn: long ones in batch 0, short ones in batch 1.
// What pads them has no target.
struct Batch {
  Batch(const engine::Memory& memory, std::uint64_t step, int batch) {
    std::vector<std::int32_t> tokens_of_all, targets_of_all;
    const engine::RandomStream random{step, static_cast<std::uint64_t>(batch)};
    for (std::int64_t row = 0; row < kRows; ++row) {
      const std::int64_t length = batch == 0 ? kTokens - row : 1 + row;
      const std::int64_t first = random.bits(static_cast<std::uint64_t>(row)) % kVocab;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        tokens_of_all.push_back(std::int32_t((first + t) % kVocab));
        targets_of_all.push_back(t < length ? std::int32_t((first + t + 1) % kVocab) : kMasked);
      }
      num_targets += length;
    }
    tokens = Tensor::from<std::int32_t>(memory, {kRows, kTokens}, tokens_of_all, "tokens");
    targets = Tensor::from<std::int32_t>(memory, {kRows, kTokens}, targets_of_all, "targets");
  }
  Tensor tokens, targets;
  std::int64_t num_targets = 0;  // those that are not masked
};

// Returns the last loss, which is that of all ranks, and the parameters.
std::vector<float> train(comm::ProcessGroup& world, bool is_mean_over_tokens) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  llama::Model model(
      {.vocab = kVocab, .width = 16, .heads = 2, .kv_heads = 1, .hidden = 32, .layers = 1});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks, &model.root,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0});
  std::vector<float> result(1);
  for (std::uint64_t step = 0; step < 150; ++step) {
    float sum = 0;  // of the losses of this rank's tokens
    for (int i = world.rank(); i < kBatches; i += world.size()) {
      const Batch batch(memory, step, i);
      shard::MicroStep micro;
      if (is_mean_over_tokens) micro.weight = batch.num_targets;
      i < world.size() ? fsdp.begin_step(kBatches / world.size(), micro)
                       : fsdp.next_micro_step(micro);
      const Tensor logits = model.logits(tape, batch.tokens);
      Tensor loss = ops::sum(tape, ops::cross_entropy_rows(tape, logits, batch.targets, kMasked));
      sum += loss.item();
      if (!is_mean_over_tokens) loss = ops::scale(tape, loss, 1.0f / float(batch.num_targets));
      tape.backward(loss);
    }
    adam.step(/*lr=*/1e-2, fsdp.finish_step(), /*max_norm=*/1);
    const auto sums = sum_over_ranks(world, tape, std::array{sum});
    result[0] = sums[0] * static_cast<float>(fsdp.mean_scale());  // one over all targets
  }
  for (const auto* p : fsdp.parameters())
    for (const float value : fsdp.full_parameter(*p)) result.push_back(value);
  return result;
}

int main() {
  std::array<std::vector<float>, kBatches> two;
  std::vector<float> one, means;
  comm::run_ranks(2, {}, [&](auto& world) { two.at(world.rank()) = train(world, true); });
  comm::run_ranks(1, {}, [&](auto& world) { one = train(world, true); });
  comm::run_ranks(1, {}, [&](auto& world) { means = train(world, false); });
  std::printf("loss per token %.6f on two ranks, %.6f on one\n", two[0][0], one[0]);
  return two[0] == one && two[0] == two[1] && one != means && one[0] < 0.05f ? 0 : 1;
}
