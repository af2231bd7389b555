// A transformer of Llama's kind (Touvron et al., arXiv:2302.13971): RMS norms before each branch,
// rotary positions, grouped queries, gated MLPs. Mistral, Qwen2 and Qwen3 differ in biases and in
// norms of queries and keys. Parameter names are those of Hugging Face without "model.", but for
// queries, keys and values, which are one parameter; matrices are (out, in).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "ops/attention.h"
#include "tools/huggingface/llama_files.h"
#include "tools/models/family.h"
#include "tools/models/transformer.h"

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

class Llama : public Transformer {
 public:
  /// Throws InvalidArgument as LlamaConfig::validate().
  explicit Llama(const LlamaConfig& config);
  ~Llama() override;

  double train_flops(std::int64_t tokens) const override;
  std::vector<LinearModule> linear_modules() const override;
  ModelLayout layout() const override;
  std::string config_text() const override;
  /// Queries, keys and values are three.
  std::vector<engine::TensorSpec> file_tensors(const engine::Parameter& p) const override;

 private:
  struct Layer;

  engine::Tensor embed(engine::Tape& tape, const engine::Tensor& tokens, const Pass& pass) override;
  engine::Tensor layer_forward(engine::Tape& tape, std::size_t index, const engine::Tensor& x,
                               const Pass& pass) override;
  engine::Tensor last_norm(engine::Tape& tape, const engine::Tensor& x) override;
  engine::Parameter& head() override { return head_ ? *head_ : embedding_; }

  LlamaConfig config_;
  engine::Parameter embedding_, norm_;
  std::optional<engine::Parameter> head_;  // none: the embedding
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace tessera::tools
