// Models of Llama's kind in the layout of Hugging Face transformers: their config.json, and how
// their tensors are called ("model.layers.0.self_attn.q_proj.weight", ...). Matrices are (out, in).
#pragma once

#include <cstdint>
#include <string>

#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_weights.h"
#include "tools/huggingface/rotation.h"

namespace tessera::tools {

/// The part of config.json that we honour.
struct LlamaFileConfig {
  std::string kind = "llama";  ///< model_type: llama, mistral, qwen2 or qwen3
  std::int64_t layers = 0, heads = 0, kv_heads = 0;
  std::int64_t head_dim = 0;   ///< D
  std::int64_t dim = 0;        ///< C
  std::int64_t mlp_dim = 0;    ///< width between the matrices of an MLP
  std::int64_t positions = 0;  ///< longest sequence
  std::int64_t vocab = 0;      ///< V
  double norm_eps = 1e-6;      ///< of all norms
  double rope_theta = 10000;
  RopeFileScaling rope_scaling = {};
  bool tied = false;  ///< the head is the embedding
  bool qkv_bias = false, out_bias = false, mlp_bias = false;

  FileRotation rotation() const { return {.theta = rope_theta, .scaling = rope_scaling}; }
  bool has_qk_norms() const { return kind == "qwen3"; }
  bool operator==(const LlamaFileConfig&) const = default;
};

/// Of a folder whose model_type is `kind`. Throws IoError naming the file and the key: not JSON, a
/// size missing or out of range, a variant that we do not compute (another activation or rotation,
/// windows, quantised weights, ...), or not what the weights were saved with.
LlamaFileConfig read_llama_config(const FolderConfig& folder, const std::string& kind);

/// What config.json says of such a model, for AutoModelForCausalLM.from_pretrained.
std::string llama_config_text(const LlamaFileConfig& config);

/// `tied`: the head is the embedding.
ModelLayout llama_layout(const std::string& kind, bool tied);

}  // namespace tessera::tools
