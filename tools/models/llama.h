// A transformer of Llama's kind (Touvron et al., arXiv:2302.13971): RMS norms before each branch,
// rotary positions, grouped queries, gated MLPs. Mistral, Qwen2 and Qwen3 differ in biases and in
// norms of queries and keys. Parameter names are those of Hugging Face without "model.", but for
// queries, keys and values, which are one parameter; matrices are (out, in).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "ops/attention.h"
#include "tools/io/llama_files.h"
#include "tools/models/family.h"
#include "tools/models/language_model.h"

namespace tessera::tools {

struct LlamaConfig {
  LlamaFileConfig sizes;
  double dropout = 0;  ///< of embeddings and both residual branches, in [0, 1)
  ops::CudaAttention cuda_attention = ops::CudaAttention::kAuto;

  /// Throws InvalidArgument naming the option.
  void validate() const;
};

/// llama, mistral, qwen2, qwen3.
const std::vector<const ModelFamily*>& llama_families();

class Llama : public LanguageModel {
 public:
  /// Throws InvalidArgument as LlamaConfig::validate().
  explicit Llama(const LlamaConfig& config);
  ~Llama() override;

  /// One block a layer, in forward order; root() owns the embedding, the last norm, and the head if
  /// that is not the embedding.
  std::vector<engine::Block*> blocks() override;
  engine::Block* root() override { return &root_; }

  /// tokens (B, T), targets (B, T) i32 -> mean cross-entropy, f32 scalar.
  engine::Tensor loss(engine::Tape& tape, const std::vector<engine::Tensor>& batch,
                      const Pass& pass) override;
  std::int64_t max_tokens() const override { return config_.sizes.positions; }
  double train_flops(std::int64_t tokens) const override;
  engine::Tensor next_token_logits(engine::Tape& tape, const engine::Tensor& tokens) override;

  ModelLayout layout() const override;
  std::string config_text() const override;
  /// Queries, keys and values are three.
  std::vector<engine::TensorSpec> file_tensors(const engine::Parameter& p) const override;

 private:
  struct Layer;

  engine::Tensor features(engine::Tape& tape, const engine::Tensor& tokens, const Pass& pass);
  engine::Tensor layer_forward(engine::Tape& tape, Layer& layer, const engine::Tensor& x,
                               const Pass& pass);
  engine::Parameter& head() { return head_ ? *head_ : embedding_; }

  LlamaConfig config_;
  engine::Parameter embedding_, norm_;
  std::optional<engine::Parameter> head_;  // none: the embedding
  engine::Block root_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace tessera::tools
