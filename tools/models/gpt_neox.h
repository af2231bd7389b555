// GPT-NeoX (Black et al., arXiv:2204.06745), of which Pythia are: attention and MLP of a layer take
// the same input, and the first elements of each head turn by position. Parameter names are those
// of Hugging Face without "gpt_neox."; matrices are (out, in).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "ops/attention.h"
#include "tools/huggingface/gpt_neox_files.h"
#include "tools/models/family.h"
#include "tools/models/transformer.h"

namespace tessera::tools {

const ModelFamily& gpt_neox_family();

class GptNeox : public Transformer {
 public:
  /// Throws InvalidArgument naming the option of a size that is out of range.
  GptNeox(const GptNeoxFileConfig& config, ops::CudaAttention cuda_attention);
  ~GptNeox() override;

  double train_flops(std::int64_t tokens) const override;
  std::vector<LinearModule> linear_modules() const override;
  ModelLayout layout() const override;
  std::string config_text() const override;

 private:
  struct Layer;

  engine::Tensor embed(engine::Tape& tape, const engine::Tensor& tokens, const Pass& pass) override;
  engine::Tensor layer_forward(engine::Tape& tape, std::size_t index, const engine::Tensor& x,
                               const Pass& pass) override;
  engine::Tensor last_norm(engine::Tape& tape, const engine::Tensor& x) override;
  engine::Parameter& head() override { return head_ ? *head_ : embedding_; }

  engine::Tensor attention_branch(engine::Tape& tape, std::size_t index, const engine::Tensor& x,
                                  const Pass& pass);
  engine::Tensor mlp(engine::Tape& tape, std::size_t index, const engine::Tensor& x,
                     const Pass& pass);

  GptNeoxFileConfig config_;
  ops::CudaAttention cuda_attention_;
  engine::Parameter embedding_, norm_weight_, norm_bias_;
  std::optional<engine::Parameter> head_;  // none: the embedding
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace tessera::tools
