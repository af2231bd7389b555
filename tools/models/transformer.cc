#include "tools/models/transformer.h"

#include "engine/error.h"
#include "ops/attention.h"
#include "ops/cross_entropy.h"
#include "ops/linear.h"
#include "tools/models/residual_dropout.h"

namespace tessera::tools {

using engine::require;
using engine::Tape;
using engine::Tensor;

Tensor Transformer::dropped(Tape& tape, const Tensor& branch, const std::string& name,
                            const Pass& pass) const {
  return residual_dropout(tape, branch, dropout_, name, pass);
}

Tensor Transformer::attention(Tape& tape, std::size_t index, const Tensor& qkv,
                              const ops::AttentionShape& shape, const Pass& pass) {
  if (pass.cache != nullptr) return pass.cache->attention(tape, index, qkv, shape);
  ops::AttentionShape of_documents = shape;
  of_documents.positions = pass.positions;
  return ops::attention(tape, qkv, of_documents);
}

Tensor Transformer::positions(const Pass& pass) {
  return pass.cache != nullptr ? pass.cache->positions() : pass.positions;
}

void Transformer::add_lora(const LoraOptions& options) {
  require(!lora_, "[{}] expected to get adapters once, got more", where_);
  for (engine::Parameter* p : parameters_of(*this)) p->trainable = false;
  lora_.emplace(options, linear_modules(), blocks_);
}

Tensor Transformer::adapted(Tape& tape, std::size_t index,
                            std::initializer_list<std::string_view> modules, const Tensor& x,
                            const Tensor& y, const Pass& pass) {
  return lora_ ? lora_->add_to(tape, index, modules, x, y, pass) : y;
}

double Transformer::train_flops_of(std::int64_t tokens, double linears, double attention,
                                   double head) const {
  if (!lora_) return 3 * (linears + attention + head);
  return 2 * (linears + head) + 3 * attention + lora_->train_flops(tokens);
}

Tensor Transformer::features(Tape& tape, const Tensor& tokens, const Pass& pass) {
  const std::int64_t before = pass.cache != nullptr ? pass.cache->num_tokens() : 0;
  require(tokens.shape().rank() == 2 && tokens.dim(1) <= max_tokens_ - before,
          "[{}] expected tokens (B, T) with T of at most {}, got {}", where_, max_tokens_ - before,
          tokens.shape().str());
  Tensor x = dropped(tape, embed(tape, tokens, pass), "drop", pass);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    x = tape.region(*blocks_[i], [=, this, &tape] { return layer_forward(tape, i, x, pass); },
                    {.recompute = pass.recompute(static_cast<std::int64_t>(i))});
  }
  return last_norm(tape, x);
}

Tensor Transformer::loss(Tape& tape, const std::vector<Tensor>& batch, const Pass& pass) {
  require(batch.size() == 2 || batch.size() == 3,
          "[{}] expected a batch of tokens, targets and, if at all, positions, got {} tensors",
          where_, batch.size());
  Pass of_batch = pass;
  require(pass.cache == nullptr && !pass.positions.defined(),
          "[{}] expected a loss without kept tokens, and positions in the batch alone", where_);
  if (batch.size() == 3) of_batch.positions = batch[2];
  return tape.region(root_, [&] {
    return ops::linear_cross_entropy(tape, features(tape, batch[0], of_batch), head(), batch[1],
                                     {.is_sum = pass.is_sum});
  });
}

Tensor Transformer::next_token_logits(Tape& tape, const Tensor& tokens) {
  return last_logits(tape, tokens, {.training = false});
}

Tensor Transformer::next_token_logits(Tape& tape, const Tensor& tokens, KeyValueCache& cache) {
  cache.begin(tape, tokens.dim(1));
  Tensor logits = last_logits(tape, tokens, {.training = false, .cache = &cache});
  cache.end();
  return logits;
}

Tensor Transformer::last_logits(Tape& tape, const Tensor& tokens, const Pass& pass) {
  return tape.no_grad([&] {
    return tape.region(root_, [&] {
      const Tensor x = features(tape, tokens, pass);
      const std::int64_t B = x.dim(0), T = x.dim(1), dim = x.dim(2);
      require(B == 1 || T == 1,
              "[{}] expected tokens of one text, or one of each, for those that are next, got {}",
              where_, tokens.shape().str());
      const Tensor last = x.slice((T - 1) * dim, {B, dim});
      return ops::linear(tape, last, head(), nullptr, ops::WeightLayout::kOutIn);
    });
  });
}

}  // namespace tessera::tools
