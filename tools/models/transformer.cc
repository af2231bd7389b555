#include "tools/models/transformer.h"

#include "engine/error.h"
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

Tensor Transformer::features(Tape& tape, const Tensor& tokens, const Pass& pass) {
  require(tokens.shape().rank() == 2 && tokens.dim(1) <= max_tokens_,
          "[{}] expected tokens (B, T) with T of at most {}, got {}", where_, max_tokens_,
          tokens.shape().str());
  Tensor x = dropped(tape, embed(tape, tokens), "drop", pass);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    x = tape.region(*blocks_[i], [=, this, &tape] { return layer_forward(tape, i, x, pass); },
                    {.recompute = pass.recompute(static_cast<std::int64_t>(i))});
  }
  return last_norm(tape, x);
}

Tensor Transformer::loss(Tape& tape, const std::vector<Tensor>& batch, const Pass& pass) {
  require(batch.size() == 2, "[{}] expected a batch of tokens and targets, got {} tensors", where_,
          batch.size());
  return tape.region(root_, [&] {
    return ops::linear_cross_entropy(tape, features(tape, batch[0], pass), head(), batch[1], {});
  });
}

Tensor Transformer::next_token_logits(Tape& tape, const Tensor& tokens) {
  return tape.no_grad([&] {
    return tape.region(root_, [&] {
      const Tensor x = features(tape, tokens, {.training = false});
      const std::int64_t dim = x.dim(2);
      const Tensor last = x.slice((x.dim(0) * x.dim(1) - 1) * dim, {1, dim});
      return ops::linear(tape, last, head(), nullptr, ops::WeightLayout::kOutIn);
    });
  });
}

}  // namespace tessera::tools
