#include "tools/huggingface/gpt_neox_files.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"

namespace tessera::tools {

using engine::IoError;
using engine::json_literal;
using engine::require;

namespace {

constexpr const char* kFamily = "gpt_neox";
constexpr RotationKeys kRotation{.theta = "rotary_emb_base",
                                 .part = "rotary_pct",
                                 .part_unless_there = 0.25,
                                 .may_be_partial = true};

bool is_buffer(std::string_view name) {
  return name.ends_with(".attention.bias") || name.ends_with(".attention.masked_bias") ||
         name.ends_with("rotary_emb.inv_freq");
}

GptNeoxFileConfig parse_config(const ConfigText& text) {
  const ConfigFile file(text, kFamily);
  GptNeoxFileConfig config;
  file.one_of("model_type", {kFamily});
  config.layers = file.integer("num_hidden_layers");
  config.heads = file.integer("num_attention_heads");
  config.dim = file.integer("hidden_size");
  require<IoError>(
      config.dim % config.heads == 0,
      "[{}] expected hidden_size to be a multiple of num_attention_heads, got {} and {} ({})",
      kFamily, config.dim, config.heads, text.path);
  config.mlp_dim = file.integer("intermediate_size");
  config.positions = file.integer("max_position_embeddings");
  config.vocab = file.integer("vocab_size");
  config.norm_eps = file.number("layer_norm_eps", config.norm_eps, 1e-30, 1);
  config.rotation = read_rotation(file, kRotation);
  // Some versions of transformers prefer these, others pass them over.
  file.one_of("rope_theta", {config.rotation.theta});
  file.one_of("partial_rotary_factor", {config.rotation.part});
  require<IoError>(config.rotary_dims() >= 2 && config.rotary_dims() % 2 == 0,
                   "[{}] expected {} of an even number of elements, got {} of {} ({})", kFamily,
                   kRotation.part, config.rotation.part, config.head_dim(), text.path);
  config.parallel = file.one_of("use_parallel_residual", {true, false}).get<bool>();
  config.tied = file.one_of("tie_word_embeddings", {false, true}).get<bool>();
  config.attention_bias = file.one_of("attention_bias", {true, false}).get<bool>();
  // The last three are names of one function.
  config.tanh_gelu =
      file.one_of("hidden_act", {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"}) != "gelu";
  config.hidden_dropout = file.number("hidden_dropout", config.hidden_dropout, 0, 1);
  file.number("attention_dropout", 0, 0, 1);
  file.one_of("head_dim", {nullptr, config.head_dim()});
  file.one_of("is_causal", {true});
  file.one_of("quantization_config", {nullptr});
  file.all_of("layer_types", "full_attention");
  return config;
}

}  // namespace

GptNeoxFileConfig read_gpt_neox_config(const FolderConfig& folder) {
  std::optional<GptNeoxFileConfig> saved;
  if (folder.saved) saved = parse_config(*folder.saved);
  if (!folder.file) return saved.value();
  const GptNeoxFileConfig config = parse_config(*folder.file);
  if (!saved) return config;
  // Dropout is the reader's to change; the rest makes the weights the model that they are.
  const auto check = [&](const char* key, auto got, auto expected) {
    check_as_saved(got == expected, kFamily, key, fmt::to_string(got), fmt::to_string(expected),
                   folder);
  };
  check("num_hidden_layers", config.layers, saved->layers);
  check("num_attention_heads", config.heads, saved->heads);
  check("hidden_size", config.dim, saved->dim);
  check("intermediate_size", config.mlp_dim, saved->mlp_dim);
  check("max_position_embeddings", config.positions, saved->positions);
  check("vocab_size", config.vocab, saved->vocab);
  check("layer_norm_eps", config.norm_eps, saved->norm_eps);
  check_as_saved(config.rotation, saved->rotation, kFamily, kRotation, folder);
  check("use_parallel_residual", config.parallel, saved->parallel);
  check("tie_word_embeddings", config.tied, saved->tied);
  check("attention_bias", config.attention_bias, saved->attention_bias);
  check("hidden_act", config.tanh_gelu ? "gelu_new" : "gelu",
        saved->tanh_gelu ? "gelu_new" : "gelu");
  return config;
}

// Put together by hand: the destructor of a JSON library's value allocates, and a save must not end
// the process when memory is short.
std::string gpt_neox_config_text(const GptNeoxFileConfig& c) {
  const std::pair<const char*, std::string> keys[] = {
      {"architectures", fmt::format("[{}]", json_literal("GPTNeoXForCausalLM"))},
      {"attention_bias", json_literal(c.attention_bias)},
      {"attention_dropout", json_literal(0.0)},
      {"bos_token_id", "null"},
      {"eos_token_id", "null"},
      {"hidden_act", json_literal(c.tanh_gelu ? "gelu_new" : "gelu")},
      {"hidden_dropout", json_literal(c.hidden_dropout)},
      {"hidden_size", json_literal(c.dim)},
      {"intermediate_size", json_literal(c.mlp_dim)},
      {"layer_norm_eps", json_literal(c.norm_eps)},
      {"max_position_embeddings", json_literal(c.positions)},
      {"model_type", json_literal(kFamily)},
      {"num_attention_heads", json_literal(c.heads)},
      {"num_hidden_layers", json_literal(c.layers)},
      {"rope_scaling", rope_scaling_text(c.rotation.scaling)},
      {kRotation.theta, json_literal(c.rotation.theta)},
      {kRotation.part, json_literal(c.rotation.part)},
      {"tie_word_embeddings", json_literal(c.tied)},
      {"torch_dtype", json_literal("float32")},
      {"use_parallel_residual", json_literal(c.parallel)},
      {"vocab_size", json_literal(c.vocab)},
  };
  std::string text;
  for (const auto& [key, value] : keys) {
    text += fmt::format("{}  {}: {}", text.empty() ? "{\n" : ",\n", json_literal(key), value);
  }
  return text + "\n}\n";
}

ModelLayout gpt_neox_layout(bool tied) {
  return {.family = kFamily,
          .title = "GPT-NeoX",
          .config_key = "hidden_size",
          .prefix = "gpt_neox.",
          .head = "embed_out.weight",
          .embedding = tied ? "embed_in.weight" : "",
          .is_ignored = is_buffer};
}

}  // namespace tessera::tools
