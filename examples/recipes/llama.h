// A model like Llama (Touvron et al., arXiv:2302.13971) with grouped queries. It can keep the keys
// and values of the tokens that it has seen.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "engine/tape.h"
#include "ops/add.h"
#include "ops/dims/slice.h"
#include "ops/dot_product_attention.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace llama {

namespace ops = tessera::ops;
using tessera::engine::Block, tessera::engine::Init, tessera::engine::Parameter;
using tessera::engine::Tape, tessera::engine::Tensor;

struct Sizes {
  std::int64_t vocab, width, heads, kv_heads, hidden, layers;
};

/// Keys and values of a layer, (B, S, KV, D) of the S tokens so far. Inside Tape::no_grad() alone:
/// no gradient passes from one forward to another. Each forward copies them.
struct Cache {
  Tensor keys, values;
};

inline Tensor product(Tape& tape, const Tensor& x, Parameter& w) {
  return ops::linear(tape, x, w, nullptr, ops::WeightLayout::kOutIn);
}

struct Layer {
  Layer(std::string of, const Sizes& sizes) : name(std::move(of)), s(sizes) {}
  Parameter weight(const char* end, std::int64_t out_size, std::int64_t in_size) const {
    return {name + end, {out_size, in_size}, Init::normal(0.02f)};
  }

  // x (B, T, C) of tokens at positions `at` (T), which follow those of `kept` unless it is null.
  Tensor operator()(Tape& tape, const Tensor& x, const Tensor& at, const Tensor& mask,
                    Cache* kept) {
    const Tensor h = ops::rmsnorm(tape, x, norm);
    const auto heads = [&](Parameter& w) {
      return product(tape, h, w).reshape({x.dim(0), x.dim(1), w.shape.dim(0) / D, D});
    };
    const Tensor queries = ops::rope(tape, heads(q), {.positions = at});
    Tensor keys = ops::rope(tape, heads(k), {.positions = at}), values = heads(v);
    if (kept != nullptr) {
      if (kept->keys.defined()) {
        keys = ops::concat(tape, {kept->keys, keys}, 1);
        values = ops::concat(tape, {kept->values, values}, 1);
      }
      *kept = {keys, values};
    }
    const Tensor y = ops::dot_product_attention(tape, queries, keys, values, {.mask = mask});
    const Tensor z = product(tape, y.reshape(x.shape()), out);
    const auto [sum, m] = ops::add_rmsnorm(tape, x, z, mlp_norm);
    const Tensor gated = ops::swiglu(tape, product(tape, m, gate), product(tape, m, up));
    return ops::add(tape, sum, product(tape, gated, down));
  }

  std::string name;
  Sizes s;
  std::int64_t D = s.width / s.heads, KV = s.kv_heads * D;
  Parameter norm{name + ".norm", {s.width}, Init::ones()};
  Parameter mlp_norm{name + ".mlp_norm", {s.width}, Init::ones()};
  Parameter q = weight(".q", s.width, s.width), k = weight(".k", KV, s.width);
  Parameter v = weight(".v", KV, s.width), out = weight(".out", s.width, s.width);
  Parameter gate = weight(".gate", s.hidden, s.width), up = weight(".up", s.hidden, s.width);
  Parameter down = weight(".down", s.width, s.hidden);
  Block block{name, {&norm, &q, &k, &v, &out, &mlp_norm, &gate, &up, &down}};
};

struct Model {
  explicit Model(const Sizes& sizes) : s(sizes) {
    for (std::int64_t i = 0; i < s.layers; ++i)
      blocks.push_back(&layers.emplace_back("layers." + std::to_string(i), s).block);
  }

  /// Of tokens (B, T) i32 the logits (B, T, V) of the next ones. With `caches`, none or one for
  /// each layer, they follow those that these hold, and are added.
  Tensor logits(Tape& tape, const Tensor& tokens, std::vector<Cache>* caches = nullptr) {
    const bool follows = caches != nullptr && !caches->empty();
    const std::int64_t T = tokens.dim(1), S = T + (follows ? caches->front().keys.dim(1) : 0);
    if (caches != nullptr) caches->resize(layers.size());
    std::vector<std::int32_t> numbers;
    for (std::int64_t t = S - T; t < S; ++t) numbers.push_back(static_cast<std::int32_t>(t));
    const Tensor at = Tensor::from<std::int32_t>(tape.memory(), {T}, numbers, "positions");
    return tape.region(root, [&] {
      Tensor x = ops::embedding(tape, tokens, table);
      const Tensor mask = ops::causal_mask(tape, T, S, x.dtype());
      for (std::size_t i = 0; i < layers.size(); ++i) {
        Cache* const kept = caches != nullptr ? &(*caches)[i] : nullptr;
        x = tape.region(layers[i].block, [&] { return layers[i](tape, x, at, mask, kept); });
      }
      return product(tape, ops::rmsnorm(tape, x, norm), table);
    });
  }

  Sizes s;
  Parameter table{"table", {s.vocab, s.width}, Init::normal(0.02f)};
  Parameter norm{"norm", {s.width}, Init::ones()};
  Block root{"root", {&table, &norm}};
  std::deque<Layer> layers;  // parameters do not move
  std::vector<Block*> blocks;
};

}  // namespace llama
