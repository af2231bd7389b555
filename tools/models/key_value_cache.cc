#include "tools/models/key_value_cache.h"

#include <numeric>

#include "engine/copy.h"
#include "engine/error.h"
#include "ops/dims/slice.h"
#include "ops/dot_product_attention.h"

namespace tessera::tools {

using engine::Tape;
using engine::Tensor;

void KeyValueCache::begin(Tape& tape, std::int64_t count) {
  engine::require(
      count <= max_tokens_ - num_tokens_,
      "[key_value_cache] expected at most {} tokens in all, got {} more than the {} that are there",
      max_tokens_, count, num_tokens_);
  num_new_ = count;
  mask_ = {};
  if (num_tokens_ == 0) return;
  std::vector<std::int32_t> places(static_cast<std::size_t>(count));
  std::iota(places.begin(), places.end(), static_cast<std::int32_t>(num_tokens_));
  positions_ = Tensor::from<std::int32_t>(tape.memory(), {count}, places, "positions");
}

Tensor KeyValueCache::attention(Tape& tape, std::size_t layer, const Tensor& qkv,
                                const ops::AttentionShape& shape) {
  const std::int64_t H = shape.num_heads, KV = shape.num_kv_heads > 0 ? shape.num_kv_heads : H;
  const std::int64_t T = qkv.dim(1), S = num_tokens_ + T, D = qkv.dim(2) / (H + 2 * KV);
  engine::require(qkv.dim(0) == 1 && T == num_new_ && shape.causal && layer <= layers_.size(),
                  "[key_value_cache] expected queries, keys and values of one sequence and {} "
                  "tokens, got {} (layer {})",
                  num_new_, qkv.shape(), layer);
  if (layer == layers_.size()) {
    const auto empty = [&](const char* name) {
      return Tensor::empty(tape.memory(), {1, max_tokens_, KV, D}, qkv.dtype(), name);
    };
    layers_.push_back({empty("cache.keys"), empty("cache.values")});
  }
  const Layer& kept = layers_[layer];
  const auto parts = ops::split(tape, qkv.reshape({1, T, H + 2 * KV, D}), 2, {H, KV, KV});
  const std::int64_t begin = num_tokens_ * KV * D;
  engine::copy(kept.keys.slice(begin, {1, T, KV, D}), parts[1], tape.stream(), "cache.keys");
  engine::copy(kept.values.slice(begin, {1, T, KV, D}), parts[2], tape.stream(), "cache.values");
  if (num_tokens_ == 0) return ops::attention(tape, qkv, shape);
  if (T > 1 && !mask_.defined()) mask_ = ops::causal_mask(tape, T, S, qkv.dtype());  // one sees all
  const Tensor y = ops::dot_product_attention(tape, parts[0], kept.keys.slice(0, {1, S, KV, D}),
                                              kept.values.slice(0, {1, S, KV, D}),
                                              {.scale = shape.scale, .mask = mask_});
  return y.reshape({1, T, H * D});
}

}  // namespace tessera::tools
