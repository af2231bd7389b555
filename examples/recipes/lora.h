// A small model of tokens with a low-rank adapter at each matrix (Hu et al., "LoRA",
// arXiv:2106.09685).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "ops/add.h"
#include "ops/elementwise/unary.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/scale.h"

namespace lora {

namespace ops = tessera::ops;
using tessera::engine::Block, tessera::engine::DType, tessera::engine::Init;
using tessera::engine::Parameter, tessera::engine::Tape, tessera::engine::Tensor;

constexpr std::int64_t kRank = 2;
constexpr float kAlpha = 4;  // how much of what adapters make is added: kAlpha / kRank

/// x W + (alpha / r) x A B; of tokens, which are i32, the rows of W and of A. B starts as zeros, so
/// that the adapter begins by adding nothing.
struct Layer {
  Layer(const std::string& name, std::int64_t in, std::int64_t out)
      : weight{name + ".weight", {in, out}, Init::normal(0.3f)},
        a{name + ".a", {in, kRank}, Init::normal(0.3f), /*trainable=*/false},
        b{name + ".b", {kRank, out}, Init::zeros(), /*trainable=*/false},
        block{name, {&weight, &a, &b}} {}

  Tensor operator()(Tape& tape, const Tensor& x) {
    const auto product = [&](Parameter& w) {
      const bool is_tokens = x.dtype() == DType::kI32;
      return is_tokens ? ops::embedding(tape, x, w) : ops::linear(tape, x, w, nullptr);
    };
    return tape.region(block, [&] {
      const Tensor low = ops::linear(tape, product(a), b, nullptr);
      return ops::add(tape, product(weight), ops::scale(tape, low, kAlpha / kRank));
    });
  }

  Parameter weight, a, b;
  Block block;
};

/// Of tokens (N) the logits (N, V) of the next ones, each from one token alone.
struct Model {
  Model(std::int64_t vocab, std::int64_t width)
      : table("table", vocab, width), hidden("hidden", width, width), out("out", width, vocab) {}

  Tensor operator()(Tape& tape, const Tensor& tokens) {
    return out(tape, ops::tanh(tape, hidden(tape, table(tape, tokens))));
  }
  std::vector<Block*> blocks() { return {&table.block, &hidden.block, &out.block}; }
  /// What was there before the adapters.
  std::vector<Parameter*> base() { return {&table.weight, &hidden.weight, &out.weight}; }
  /// Adapters learn from now on, and nothing else does; call Fsdp::trainable_changed() next.
  void freeze_base() {
    for (Layer* layer : {&table, &hidden, &out}) {
      layer->weight.trainable = false;
      layer->a.trainable = layer->b.trainable = true;
    }
  }

  Layer table, hidden, out;
};

}  // namespace lora
