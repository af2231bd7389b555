// A small Llama learns a text, sharded over two ranks, and then goes on with it in two ways: from
// all of its context for each token, and from one token with the keys and values of the others
// kept.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "llama.h"
#include "ops/cross_entropy.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape;
using engine::Tensor;

using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kBatch = 4, kTokens = 48;
constexpr char kText[] =
    "a rope has two ends, a ring has none; who counts them all, small ones too, "
    "will sit here until evening comes. ";
constexpr std::int64_t kLength = sizeof(kText) - 1;

Tensor tensor_of(Tape& tape, std::int64_t rows, std::span<const std::int32_t> tokens) {
  return Tensor::from<std::int32_t>(tape.memory(), {rows, std::ssize(tokens) / rows}, tokens, "t");
}

// `count` characters of the text from `begin` on, which repeats.
Tokens text(std::int64_t begin, std::int64_t count) {
  Tokens tokens;
  for (std::int64_t i = begin; i < begin + count; ++i)
    tokens.push_back(static_cast<unsigned char>(kText[i % kLength]));
  return tokens;
}

// The prompt and the `count` most likely characters after it. With caches each forward reads what
// is new alone.
std::string go_on(Tape& tape, llama::Model& model, Tokens tokens, int count, bool with_caches) {
  std::vector<llama::Cache> caches;
  std::size_t num_read = 0;
  for (int i = 0; i < count; ++i) {
    const auto context = std::span<const std::int32_t>(tokens).subspan(num_read);
    const Tensor logits = tape.no_grad([&] {
      return model.logits(tape, tensor_of(tape, 1, context), with_caches ? &caches : nullptr);
    });
    if (with_caches) num_read = tokens.size();
    const std::vector<float> all = engine::to_vector<float>(logits);
    const auto last = std::span<const float>(all).last(static_cast<std::size_t>(logits.dim(-1)));
    tokens.push_back(static_cast<std::int32_t>(std::ranges::max_element(last) - last.begin()));
  }
  return {tokens.begin(), tokens.end()};
}

bool train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  llama::Model model(
      {.vocab = 128, .width = 32, .heads = 4, .kv_heads = 2, .hidden = 64, .layers = 2});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks, &model.root,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0.01});
  for (std::int64_t step = 0; step < 300; ++step) {
    Tokens inputs, targets;
    for (std::int64_t row = 0; row < kBatch; ++row) {
      const std::int64_t begin = ((step * world.size() + world.rank()) * kBatch + row) * 37;
      for (const std::int32_t t : text(begin, kTokens)) inputs.push_back(t);
      for (const std::int32_t t : text(begin + 1, kTokens)) targets.push_back(t);
    }
    fsdp.begin_step();
    const Tensor logits = model.logits(tape, tensor_of(tape, kBatch, inputs));
    tape.backward(ops::cross_entropy(tape, logits, tensor_of(tape, kBatch, targets)));
    adam.step(/*lr=*/1e-2, fsdp.finish_step(), /*max_norm=*/1);
  }
  std::string whole, cached;
  fsdp.keep_gathered([&] {
    whole = go_on(tape, model, text(0, 12), 36, false);
    cached = go_on(tape, model, text(0, 12), 36, true);
  });
  if (world.rank() == 0) std::printf("%s\n%s\n", whole.c_str(), cached.c_str());
  return whole == cached && whole == std::string(kText).substr(0, 48);
}

int main() {
  bool has_learned = false;
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    const bool mine = train(world);
    if (world.rank() == 0) has_learned = mine;
  });
  return has_learned ? 0 : 1;
}
