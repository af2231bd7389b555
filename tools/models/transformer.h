// What the transformers of all families are: an embedding, layers, a norm, and a head that gives
// logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tape.h"
#include "ops/attention.h"
#include "tools/models/language_model.h"
#include "tools/models/lora.h"

namespace tessera::tools {

/// One block a layer, in forward order; root() owns the rest. Dropout is of the embeddings and, as
/// layers apply it, of what they add.
class Transformer : public LanguageModel {
 public:
  std::vector<engine::Block*> blocks() override { return blocks_; }
  engine::Block* root() override { return &root_; }

  /// The batch of a LanguageModel -> mean or sum of the cross-entropies of the targets that are not
  /// masked, f32 scalar.
  engine::Tensor loss(engine::Tape& tape, const std::vector<engine::Tensor>& batch,
                      const Pass& pass) override;
  std::int64_t max_tokens() const override { return max_tokens_; }
  engine::Tensor next_token_logits(engine::Tape& tape, const engine::Tensor& tokens) override;
  engine::Tensor next_token_logits(engine::Tape& tape, const engine::Tensor& tokens,
                                   KeyValueCache& cache) override;
  void add_lora(const LoraOptions& options) override;

 protected:
  /// `where`: what errors begin with, "gpt".
  Transformer(std::string where, std::int64_t max_tokens, double dropout)
      : where_(std::move(where)), max_tokens_(max_tokens), dropout_(dropout) {}

  // For constructors.
  void add_layer(engine::Block& block) { blocks_.push_back(&block); }
  void add_to_root(engine::Parameter& p) { root_.parameters.push_back(&p); }

  /// `branch` with dropout; `name` tells places of the model apart.
  engine::Tensor dropped(engine::Tape& tape, const engine::Tensor& branch, const std::string& name,
                         const Pass& pass) const;
  /// ops::attention() of layer `index`, which sees the tokens of a cache, too, and of a row with
  /// documents each by itself.
  static engine::Tensor attention(engine::Tape& tape, std::size_t index, const engine::Tensor& qkv,
                                  const ops::AttentionShape& shape, const Pass& pass);
  /// Where the tokens stand; undefined: at 0 and onwards.
  static engine::Tensor positions(const Pass& pass);
  /// y of `modules` of layer `index` with what their adapters add: Lora::add_to().
  engine::Tensor adapted(engine::Tape& tape, std::size_t index,
                         std::initializer_list<std::string_view> modules, const engine::Tensor& x,
                         const engine::Tensor& y, const Pass& pass);
  bool has_adapter(std::initializer_list<std::string_view> modules) const {
    return lora_ && lora_->has(modules);
  }
  /// train_flops() of operations of a forward: those of `linears` of layers, of attention, and of
  /// the head. What is frozen has no gradient, so that its backward is one product and not two.
  double train_flops_of(std::int64_t tokens, double linears, double attention, double head) const;

 private:
  /// tokens (B, T) -> x (B, T, C)
  virtual engine::Tensor embed(engine::Tape& tape, const engine::Tensor& tokens,
                               const Pass& pass) = 0;
  /// x (B, T, C) -> x after layer `index`
  virtual engine::Tensor layer_forward(engine::Tape& tape, std::size_t index,
                                       const engine::Tensor& x, const Pass& pass) = 0;
  virtual engine::Tensor last_norm(engine::Tape& tape, const engine::Tensor& x) = 0;
  virtual engine::Parameter& head() = 0;  ///< (V, C)

  engine::Tensor last_logits(engine::Tape& tape, const engine::Tensor& tokens, const Pass& pass);
  engine::Tensor features(engine::Tape& tape, const engine::Tensor& tokens, const Pass& pass);

  std::string where_;
  std::int64_t max_tokens_;
  double dropout_;
  engine::Block root_{"root"};
  std::vector<engine::Block*> blocks_;
  std::optional<Lora> lora_;
};

}  // namespace tessera::tools
