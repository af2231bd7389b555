// GPT-2 in the layout of Hugging Face transformers: its config.json, and how its tensors are called
// ("wte.weight", "h.0.attn.c_attn.weight", ...). Matrices are (in, out).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "engine/io/safetensors.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_weights.h"
#include "tools/huggingface/model_writer.h"

namespace tessera::tools {

/// The part of config.json that we honour, under its names.
struct Gpt2FileConfig {
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;
  std::int64_t n_positions = 1024;
  std::int64_t vocab_size = 50257;
  double layer_norm_epsilon = 1e-5;
  double resid_pdrop = 0.1;
  double embd_pdrop = 0.1;
  double attn_pdrop = 0.1;

  bool operator==(const Gpt2FileConfig&) const = default;
};

/// Throws IoError naming the file and the key: not JSON, a size missing or out of range, a model
/// that is not GPT-2 or a variant that we do not compute (another activation, an untied output
/// matrix, scaled or upcast attention, quantised weights, ...), or not what the weights were saved
/// with.
Gpt2FileConfig read_gpt2_config(const FolderConfig& folder);
/// Of read_folder_config(folder).
Gpt2FileConfig read_gpt2_config(const std::string& folder);

/// What config.json says of such a model, for GPT2LMHeadModel.from_pretrained.
std::string gpt2_config_text(const Gpt2FileConfig& config);

/// Attention mask buffers, which old versions saved, are ignored.
ModelLayout gpt2_layout();

class Gpt2Weights : public ModelWeights {
 public:
  explicit Gpt2Weights(const std::string& folder) : ModelWeights(folder, gpt2_layout()) {}
};

class Gpt2Writer : public ModelWriter {
 public:
  Gpt2Writer(std::string folder, const Gpt2FileConfig& config,
             std::span<const engine::TensorSpec> tensors)
      : ModelWriter(std::move(folder), gpt2_layout(), gpt2_config_text(config), tensors) {}
};

}  // namespace tessera::tools
