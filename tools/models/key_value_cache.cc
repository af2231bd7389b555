#include "tools/models/key_value_cache.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/copy.h"
#include "engine/error.h"
#include "ops/dims/slice.h"
#include "ops/dot_product_attention.h"

namespace tessera::tools {

using engine::Tape;
using engine::Tensor;

KeyValueCache KeyValueCache::of_batch(std::vector<KeyValueCache*> texts) {
  engine::require(!texts.empty(), "[key_value_cache] expected a text at least, got none");
  KeyValueCache batch(0);
  for (const KeyValueCache* text : texts)
    batch.num_tokens_ = std::max(batch.num_tokens_, text->num_tokens_);
  batch.texts_ = std::move(texts);
  return batch;
}

void KeyValueCache::begin(Tape& tape, std::int64_t count) {
  if (!texts_.empty()) {
    std::vector<std::int32_t> places;
    for (KeyValueCache* text : texts_) {
      text->begin(tape, count);
      for (std::int64_t i = 0; i < count; ++i)
        places.push_back(static_cast<std::int32_t>(text->num_tokens_ + i));
    }
    num_new_ = count;
    positions_ =
        Tensor::from<std::int32_t>(tape.memory(), {std::ssize(texts_), count}, places, "positions");
    return;
  }
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
  if (!texts_.empty()) return batch_attention(tape, layer, qkv, shape);
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

// Texts have other numbers of tokens, so each attends by itself.
Tensor KeyValueCache::batch_attention(Tape& tape, std::size_t layer, const Tensor& qkv,
                                      const ops::AttentionShape& shape) {
  const auto B = std::ssize(texts_);
  engine::require(qkv.dim(0) == B,
                  "[key_value_cache] expected queries, keys and values of {} texts, got {} (layer "
                  "{})",
                  B, qkv.shape(), layer);
  const std::int64_t numel = qkv.numel() / B;
  std::vector<Tensor> rows;
  for (KeyValueCache* text : texts_) {
    const Tensor of_text = qkv.slice(std::ssize(rows) * numel, {1, qkv.dim(1), qkv.dim(2)});
    rows.push_back(text->attention(tape, layer, of_text, shape));
  }
  return ops::concat(tape, rows, 0);
}

void KeyValueCache::end() {
  for (KeyValueCache* text : texts_) text->end();
  num_tokens_ += num_new_;
}

}  // namespace tessera::tools
