// GPT-NeoX (Black et al., arXiv:2204.06745), of which Pythia are, in the layout of Hugging Face
// transformers: its config.json, and how its tensors are called
// ("gpt_neox.layers.0.attention.query_key_value.weight", ...). Matrices are (out, in).
#pragma once

#include <cstdint>
#include <string>

#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_weights.h"
#include "tools/huggingface/rotation.h"

namespace tessera::tools {

/// The part of config.json that we honour.
struct GptNeoxFileConfig {
  std::int64_t layers = 0, heads = 0;
  std::int64_t dim = 0;        ///< C, a multiple of heads
  std::int64_t mlp_dim = 0;    ///< width between the matrices of an MLP
  std::int64_t positions = 0;  ///< longest sequence
  std::int64_t vocab = 0;      ///< V
  double norm_eps = 1e-5;      ///< of all norms
  FileRotation rotation = {.part = 0.25};
  bool parallel = true;         ///< MLPs take what attention takes, else what it makes
  bool tied = false;            ///< the head is the embedding
  bool attention_bias = true;   ///< of queries, keys, values, and of what follows attention
  bool tanh_gelu = false;       ///< GELU by tanh, else exact
  double hidden_dropout = 0.0;  ///< of embeddings and both residual branches

  std::int64_t head_dim() const { return dim / heads; }
  /// Elements of a head that turn, as transformers rounds them.
  std::int64_t rotary_dims() const {
    return static_cast<std::int64_t>(static_cast<double>(head_dim()) * rotation.part);
  }
  bool operator==(const GptNeoxFileConfig&) const = default;
};

/// Throws IoError naming the file and the key: not JSON, a size missing or out of range, a variant
/// that we do not compute (another activation or rotation, quantised weights, ...), or not what the
/// weights were saved with.
GptNeoxFileConfig read_gpt_neox_config(const FolderConfig& folder);

/// What config.json says of such a model, for GPTNeoXForCausalLM.from_pretrained.
std::string gpt_neox_config_text(const GptNeoxFileConfig& config);

/// `tied`: the head is the embedding. Buffers of masks and rotations, which old versions saved, are
/// ignored.
ModelLayout gpt_neox_layout(bool tied);

}  // namespace tessera::tools
