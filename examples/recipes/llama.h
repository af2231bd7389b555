// A model like Llama (Touvron et al., arXiv:2302.13971) with grouped queries. It can keep the keys
// and values of the tokens that it has seen.
#pragma once

#include <cstdint>
#include <deque>
#include <numeric>
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

/// What all layers are given: the positions of the tokens, and what they see.
struct Places {
  Tensor at, mask;
};

struct Layer {
  Layer(std::string of, const Sizes& sizes) : name(std::move(of)), s(sizes) {}
  Parameter weight(const char* end, std::int64_t out_size, std::int64_t in_size) const {
    return {name + end, {out_size, in_size}, Init::normal(0.02f)};
  }

  // x (B, T, C), which follows the tokens in `cache` if there is one.
  Tensor operator()(Tape& tape, const Tensor& x, const Places& places, Cache* cache) {
    const std::int64_t B = x.dim(0), T = x.dim(1);
    const auto product = [&](const Tensor& of, Parameter& w) {
      return ops::linear(tape, of, w, nullptr, ops::WeightLayout::kOutIn);
    };
    const ops::RopeOptions rotation{.positions = places.at};
    const Tensor h = ops::rmsnorm(tape, x, norm);
    const Tensor queries = ops::rope(tape, product(h, q).reshape({B, T, s.heads, D}), rotation);
    Tensor keys = ops::rope(tape, product(h, k).reshape({B, T, s.kv_heads, D}), rotation);
    Tensor values = product(h, v).reshape({B, T, s.kv_heads, D});
    if (cache != nullptr) {
      if (cache->keys.defined()) {
        keys = ops::concat(tape, {cache->keys, keys}, 1);
        values = ops::concat(tape, {cache->values, values}, 1);
      }
      *cache = {keys, values};
    }
    const Tensor y = ops::dot_product_attention(tape, queries, keys, values, {.mask = places.mask});
    const auto [sum, m] = ops::add_rmsnorm(tape, x, product(y.reshape(x.shape()), out), mlp_norm);
    return ops::add(tape, sum, product(ops::swiglu(tape, product(m, gate), product(m, up)), down));
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
  explicit Model(const Sizes& sizes)
      : table{"table", {sizes.vocab, sizes.width}, Init::normal(0.02f)},
        norm{"norm", {sizes.width}, Init::ones()} {
    for (std::int64_t i = 0; i < sizes.layers; ++i) {
      blocks.push_back(&layers.emplace_back("layers." + std::to_string(i), sizes).block);
    }
  }

  /// Of tokens (B, T) i32 the logits (B, T, V) of the next ones. With caches, one for each layer,
  /// they follow those that these hold, and are added.
  Tensor logits(Tape& tape, const Tensor& tokens, std::vector<Cache>* caches = nullptr) {
    if (caches != nullptr) caches->resize(layers.size());
    const bool follows = caches != nullptr && caches->front().keys.defined();
    const std::int64_t T = tokens.dim(1), S = follows ? caches->front().keys.dim(1) + T : T;
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(T));
    std::iota(numbers.begin(), numbers.end(), static_cast<std::int32_t>(S - T));
    return tape.region(root, [&] {
      Tensor x = ops::embedding(tape, tokens, table);
      Places places{Tensor::from<std::int32_t>(tape.memory(), {T}, numbers, "positions"), {}};
      if (T > 1) places.mask = ops::causal_mask(tape, T, S, x.dtype());  // one sees all
      for (std::size_t i = 0; i < layers.size(); ++i) {
        Cache* const cache = caches != nullptr ? &(*caches)[i] : nullptr;
        x = tape.region(layers[i].block, [&tape, &layer = layers[i], x, places, cache] {
          return layer(tape, x, places, cache);
        });
      }
      return ops::linear(tape, ops::rmsnorm(tape, x, norm), table, nullptr,
                         ops::WeightLayout::kOutIn);
    });
  }

  Parameter table, norm;
  Block root{"root", {&table, &norm}};
  std::deque<Layer> layers;  // parameters do not move
  std::vector<Block*> blocks;
};

}  // namespace llama
