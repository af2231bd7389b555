#include "tools/huggingface/llama_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"

namespace tessera::tools {

using engine::IoError;
using engine::json_literal;
using engine::require;

namespace {

struct Kind {
  const char* name;
  const char* title;
  const char* architecture;
};
constexpr Kind kKinds[] = {{"llama", "Llama", "LlamaForCausalLM"},
                           {"mistral", "Mistral", "MistralForCausalLM"},
                           {"qwen2", "Qwen2", "Qwen2ForCausalLM"},
                           {"qwen3", "Qwen3", "Qwen3ForCausalLM"}};

const Kind& kind_of(const std::string& name) {
  const auto found = std::ranges::find(kKinds, name, &Kind::name);
  require(found != std::end(kKinds), "[llama] expected llama, mistral, qwen2 or qwen3, got {}",
          name);
  return *found;
}

bool is_null(const ConfigFile& file, const char* key) {
  return !file.has(key) || file.is_null(key);
}

// The longest sequence that sees all of itself.
std::int64_t parse_positions(const ConfigFile& file, const std::string& kind) {
  const std::int64_t positions = file.integer("max_position_embeddings");
  constexpr std::int64_t kWindowUnlessThere = 4096;
  const bool has_window =
      kind == "mistral" || file.one_of("use_sliding_window", {false, true}).get<bool>();
  if (!has_window) return positions;
  if (kind != "llama" && !file.has("sliding_window"))
    return std::min(positions, kWindowUnlessThere);
  return is_null(file, "sliding_window") ? positions
                                         : std::min(positions, file.integer("sliding_window"));
}

LlamaFileConfig parse_config(const ConfigText& text, const std::string& kind) {
  const ConfigFile file(text, kind);
  LlamaFileConfig config{.kind = kind};
  file.one_of("model_type", {kind});
  config.layers = file.integer("num_hidden_layers");
  config.heads = file.integer("num_attention_heads");
  const bool has_no_groups = kind == "llama" && is_null(file, "num_key_value_heads");
  config.kv_heads = has_no_groups ? config.heads : file.integer("num_key_value_heads");
  config.dim = file.integer("hidden_size");
  const bool says_head = !is_null(file, "head_dim") || kind == "qwen3";
  require<IoError>(
      says_head || config.dim % config.heads == 0,
      "[{}] expected hidden_size to be a multiple of num_attention_heads, got {} and {} ({})", kind,
      config.dim, config.heads, text.path);
  config.head_dim = says_head ? file.integer("head_dim") : config.dim / config.heads;
  config.mlp_dim = file.integer("intermediate_size");
  config.positions = parse_positions(file, kind);
  config.vocab = file.integer("vocab_size");
  config.norm_eps = file.number("rms_norm_eps", config.norm_eps, 1e-30, 1);
  const FileRotation rotation = read_rotation(file, {});
  config.rope_theta = rotation.theta;
  config.rope_scaling = rotation.scaling;
  config.tied = file.one_of("tie_word_embeddings", {false, true}).get<bool>();
  // Kinds that lack the keys in transformers have what is said here, whatever a file says.
  const bool may_have_bias = kind == "llama" || kind == "qwen3";
  config.out_bias = may_have_bias && file.one_of("attention_bias", {false, true}).get<bool>();
  config.qkv_bias = kind == "qwen2" || config.out_bias;
  config.mlp_bias = kind == "llama" && file.one_of("mlp_bias", {false, true}).get<bool>();
  file.one_of("hidden_act", {"silu", "swish"});  // two names of one function
  file.one_of("is_causal", {true});
  file.one_of("quantization_config", {nullptr});
  file.all_of("layer_types", "full_attention");
  return config;
}

}  // namespace

LlamaFileConfig read_llama_config(const FolderConfig& folder, const std::string& kind) {
  std::optional<LlamaFileConfig> saved;
  if (folder.saved) saved = parse_config(*folder.saved, kind);
  if (!folder.file) return saved.value();
  const LlamaFileConfig config = parse_config(*folder.file, kind);
  if (!saved) return config;
  const auto check = [&](const char* key, const auto& got, const auto& expected) {
    check_as_saved(got == expected, kind, key, fmt::to_string(got), fmt::to_string(expected),
                   folder);
  };
  check("num_hidden_layers", config.layers, saved->layers);
  check("num_attention_heads", config.heads, saved->heads);
  check("num_key_value_heads", config.kv_heads, saved->kv_heads);
  check("head_dim", config.head_dim, saved->head_dim);
  check("hidden_size", config.dim, saved->dim);
  check("intermediate_size", config.mlp_dim, saved->mlp_dim);
  check("max_position_embeddings", config.positions, saved->positions);
  check("vocab_size", config.vocab, saved->vocab);
  check("rms_norm_eps", config.norm_eps, saved->norm_eps);
  check_as_saved(config.rotation(), saved->rotation(), kind, {}, folder);
  check("tie_word_embeddings", config.tied, saved->tied);
  check("attention_bias", config.qkv_bias, saved->qkv_bias);
  check("mlp_bias", config.mlp_bias, saved->mlp_bias);
  return config;
}

// Put together by hand: the destructor of a JSON library's value allocates, and a save must not end
// the process when memory is short.
std::string llama_config_text(const LlamaFileConfig& c) {
  std::vector<std::pair<const char*, std::string>> keys = {
      {"architectures", fmt::format("[{}]", json_literal(kind_of(c.kind).architecture))},
      {"bos_token_id", "null"},
      {"eos_token_id", "null"},
      {"head_dim", json_literal(c.head_dim)},
      {"hidden_act", json_literal("silu")},
      {"hidden_size", json_literal(c.dim)},
      {"intermediate_size", json_literal(c.mlp_dim)},
      {"max_position_embeddings", json_literal(c.positions)},
      {"model_type", json_literal(c.kind)},
      {"num_attention_heads", json_literal(c.heads)},
      {"num_hidden_layers", json_literal(c.layers)},
      {"num_key_value_heads", json_literal(c.kv_heads)},
      {"rms_norm_eps", json_literal(c.norm_eps)},
      {"rope_scaling", rope_scaling_text(c.rope_scaling)},
      {"rope_theta", json_literal(c.rope_theta)},
      {"tie_word_embeddings", json_literal(c.tied)},
      {"torch_dtype", json_literal("float32")},
      {"vocab_size", json_literal(c.vocab)},
  };
  if (c.kind == "mistral") keys.emplace_back("sliding_window", "null");
  if (c.kind == "llama" || c.kind == "qwen3")
    keys.emplace_back("attention_bias", json_literal(c.qkv_bias));
  if (c.kind == "llama") keys.emplace_back("mlp_bias", json_literal(c.mlp_bias));
  std::string text;
  for (const auto& [key, value] : keys) {
    text += fmt::format("{}  {}: {}", text.empty() ? "{\n" : ",\n", json_literal(key), value);
  }
  return text + "\n}\n";
}

ModelLayout llama_layout(const std::string& kind, bool tied) {
  return {.family = kind,
          .title = kind_of(kind).title,
          .config_key = "hidden_size",
          .prefix = "model.",
          .embedding = tied ? "embed_tokens.weight" : "",
          .is_ignored = [](std::string_view name) {  // a buffer of versions before 4.32
            return name.ends_with(".rotary_emb.inv_freq");
          }};
}

}  // namespace tessera::tools
