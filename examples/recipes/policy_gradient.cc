// A small Llama learns from what it generates (Williams, 1992): to count, modulo 8. Each rank draws
// samples, with units gathered once and keys and values kept, and makes those tokens likelier that
// are one more than the token before them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/philox.h"
#include "llama.h"
#include "ops/cross_entropy.h"
#include "ops/mul.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tensor;

constexpr int kSamples = 16, kLength = 8, kVocab = 8;

// How many of the tokens that are drawn last were rewarded.
double train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
  llama::Model model(
      {.vocab = kVocab, .width = 32, .heads = 4, .kv_heads = 2, .hidden = 64, .layers = 2});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks, &model.root,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0});
  const auto tensor = [&](const std::vector<std::int32_t>& tokens) {
    return Tensor::from<std::int32_t>(memory, {kSamples, std::ssize(tokens) / kSamples}, tokens,
                                      "t");
  };
  const engine::RandomStream random{7, static_cast<std::uint64_t>(world.rank())};
  std::uint64_t num_drawn = 0;
  double mean = 0;
  for (int step = 0; step < 150; ++step) {
    std::vector<std::int32_t> last(kSamples), inputs(kSamples * kLength), targets(inputs);
    std::vector<float> weights(inputs.size());  // 1 or 0, and later how much that is above the mean
    fsdp.keep_gathered([&] {
      std::vector<llama::Cache> caches;
      for (int t = 0; t < kLength; ++t) {
        auto scores = engine::to_vector<float>(
            tape.no_grad([&] { return model.logits(tape, tensor(last), &caches); }));
        // With Gumbel's noise the largest score is a draw by the probabilities.
        for (float& score : scores) score -= std::log(-std::log(random.uniform(num_drawn++)));
        for (int i = 0; i < kSamples; ++i) {
          const auto row = scores.begin() + i * kVocab;
          const int at = i * kLength + t;
          inputs[at] = last[i];
          targets[at] = last[i] = std::max_element(row, row + kVocab) - row;
          weights[at] = targets[at] == (inputs[at] + 1) % kVocab;
        }
      }
    });
    mean = std::accumulate(weights.begin(), weights.end(), 0.0) / std::ssize(weights);
    for (float& weight : weights) weight -= static_cast<float>(mean);
    fsdp.begin_step();
    const Tensor losses =
        ops::cross_entropy_rows(tape, model.logits(tape, tensor(inputs)), tensor(targets));
    const Tensor all = Tensor::from<float>(memory, losses.shape(), weights, "weights");
    tape.backward(ops::sum(tape, ops::mul(tape, losses, all)), /*seed=*/1.0f / kSamples);
    adam.step(/*lr=*/5e-3, fsdp.finish_step(), /*max_norm=*/1);
  }
  return mean;
}

int main() {
  bool has_learned = false;
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    const double mean = train(world);
    std::printf("rank %d was rewarded for %.3f of its tokens\n", world.rank(), mean);
    if (world.rank() == 0) has_learned = mean > 0.95;
  });
  return has_learned ? 0 : 1;
}
