// A GPT-2-shaped transformer: pre-norm blocks, learned positions, tied embeddings. The blocks and
// the root are what Fsdp wraps. Parameter names and (in, out) weights are GPT-2's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "ops/attention.h"
#include "tools/models/family.h"
#include "tools/models/transformer.h"

namespace tessera::tools {

struct GptConfig {
  std::int64_t layers = 3;
  std::int64_t heads = 4;
  std::int64_t dim = 128;    ///< C, a multiple of heads
  std::int64_t seq = 64;     ///< T, longest sequence
  std::int64_t vocab = 256;  ///< V
  double dropout = 0;        ///< of embeddings and both residual branches, in [0, 1)
  double norm_eps = 1e-5;
  /// A run's choice: no file of the model keeps it.
  ops::CudaAttention cuda_attention = ops::CudaAttention::kAuto;

  /// Throws InvalidArgument naming the field.
  void validate() const;
};

/// small (default), gpt2, gpt2-medium, gpt2-large, gpt2-xl. Throws InvalidArgument otherwise.
GptConfig gpt_preset(const std::string& name);
const std::vector<std::string>& gpt_preset_names();

const ModelFamily& gpt_family();
/// What a config of gpt_family() says.
GptConfig gpt_config(const ModelConfig& config);

class Gpt : public Transformer {
 public:
  /// Throws InvalidArgument as GptConfig::validate().
  explicit Gpt(const GptConfig& config);
  ~Gpt() override;

  const GptConfig& config() const { return config_; }
  double train_flops(std::int64_t tokens) const override;
  std::vector<LinearModule> linear_modules() const override;
  ModelLayout layout() const override;
  /// Attention has no dropout here, so what is saved has none.
  std::string config_text() const override;

 private:
  struct Layer;

  engine::Tensor embed(engine::Tape& tape, const engine::Tensor& tokens, const Pass& pass) override;
  engine::Tensor layer_forward(engine::Tape& tape, std::size_t index, const engine::Tensor& x,
                               const Pass& pass) override;
  engine::Tensor mlp(engine::Tape& tape, std::size_t index, const engine::Tensor& x,
                     const Pass& pass);
  engine::Tensor last_norm(engine::Tape& tape, const engine::Tensor& x) override;
  engine::Parameter& head() override { return wte_; }

  GptConfig config_;
  engine::Parameter wte_, wpe_, ln_f_weight_, ln_f_bias_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace tessera::tools
