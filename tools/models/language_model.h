// A model of token sequences, as programs that train, sample, plan and convert know it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/io/safetensors.h"
#include "engine/tape.h"
#include "tools/huggingface/model_weights.h"
#include "tools/models/key_value_cache.h"
#include "tools/models/lora.h"
#include "tools/models/model.h"

namespace tessera::tools {

/// blocks() has one for each layer, in forward order; root() encloses them and owns the rest. The
/// batch of loss(): tokens (B, T), targets (B, T), of which -100 is masked, and where documents
/// share a row positions (B, T), which count from 0 in each; all i32. No document sees another.
class LanguageModel : public Model {
 public:
  /// T at most.
  virtual std::int64_t max_tokens() const = 0;
  /// Operations of the matrix products of a sequence of `tokens`, forward and backward (twice as
  /// many): those of attention for the pairs it sees; nothing that is computed again.
  virtual double train_flops(std::int64_t tokens) const = 0;
  /// tokens (1, T) -> logits of the last position (V) in the parameter dtype; not recorded.
  virtual engine::Tensor next_token_logits(engine::Tape& tape, const engine::Tensor& tokens) = 0;
  /// As of all tokens, those in `cache` and `tokens` (1, T) after them, which are read alone and
  /// added to it: equal to rounding, and equal bits where the cache was empty. max_tokens() at most
  /// in all. Of B texts, of one token each: tokens (B, 1) -> logits (B, V), each row to rounding
  /// what that text has alone.
  virtual engine::Tensor next_token_logits(engine::Tape& tape, const engine::Tensor& tokens,
                                           KeyValueCache& cache) = 0;

  // Low-rank adapters.

  /// The linear modules of a layer, alike in all layers; none: adapters cannot be added.
  virtual std::vector<LinearModule> linear_modules() const { return {}; }
  /// Freezes all parameters and adds adapters, which alone are trained: before anything wraps the
  /// model, once. Throws InvalidArgument naming what is out of range, or for a model without
  /// linear_modules().
  virtual void add_lora(const LoraOptions& options);

  // Files, in the layout of Hugging Face.

  virtual ModelLayout layout() const = 0;
  virtual std::string config_text() const = 0;  ///< of config.json
  /// The tensors that keep `p`, one of the model's own: their values, one after the other, are its.
  virtual std::vector<engine::TensorSpec> file_tensors(const engine::Parameter& p) const;
};

}  // namespace tessera::tools
