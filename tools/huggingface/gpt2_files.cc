#include "tools/huggingface/gpt2_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

namespace {

bool is_mask_buffer(std::string_view name) {
  return name.starts_with("h.") &&
         (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

Gpt2FileConfig parse_config(const ConfigText& text) {
  const ConfigFile file(text, "gpt2");
  Gpt2FileConfig config;
  file.one_of("model_type", {"gpt2"});
  config.n_layer = file.integer("n_layer");
  config.n_head = file.integer("n_head");
  config.n_embd = file.integer("n_embd");
  config.n_positions = file.integer(file.has("n_positions") ? "n_positions" : "n_ctx");
  config.vocab_size = file.integer("vocab_size");
  require<IoError>(config.n_embd % config.n_head == 0,
                   "[gpt2] expected n_embd to be a multiple of n_head, got {} and {} ({})",
                   config.n_embd, config.n_head, text.path);
  constexpr double kSmallest = 1e-30;
  config.layer_norm_epsilon =
      file.number("layer_norm_epsilon", config.layer_norm_epsilon, kSmallest, 1);
  config.resid_pdrop = file.number("resid_pdrop", config.resid_pdrop, 0, 1);
  config.embd_pdrop = file.number("embd_pdrop", config.embd_pdrop, 0, 1);
  config.attn_pdrop = file.number("attn_pdrop", config.attn_pdrop, 0, 1);
  // Two names of one function, the tanh approximation.
  file.one_of("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  file.one_of("n_inner", {nullptr, 4 * config.n_embd});
  file.one_of("tie_word_embeddings", {true});
  file.one_of("scale_attn_weights", {true});
  file.one_of("scale_attn_by_inverse_layer_idx", {false});
  file.one_of("reorder_and_upcast_attn", {false});
  file.one_of("add_cross_attention", {false});
  file.one_of("quantization_config", {nullptr});
  return config;
}

}  // namespace

ModelLayout gpt2_layout() {
  return {.family = "gpt2",
          .title = "GPT-2",
          .config_key = "n_embd",
          .may_be_unnamed = true,
          .is_in_out = true,
          .prefix = "transformer.",
          .embedding = "wte.weight",
          .is_ignored = is_mask_buffer};
}

Gpt2FileConfig read_gpt2_config(const FolderConfig& folder) {
  std::optional<Gpt2FileConfig> saved;
  if (folder.saved) saved = parse_config(*folder.saved);
  if (!folder.file) return saved.value();
  const Gpt2FileConfig config = parse_config(*folder.file);
  if (!saved) return config;
  // Dropout is the reader's to change; the rest makes the weights the model that they are.
  const auto check = [&](const char* key, auto got, auto expected) {
    check_as_saved(got == expected, "gpt2", key, fmt::to_string(got), fmt::to_string(expected),
                   folder);
  };
  check("n_layer", config.n_layer, saved->n_layer);
  check("n_head", config.n_head, saved->n_head);
  check("n_embd", config.n_embd, saved->n_embd);
  check("n_positions", config.n_positions, saved->n_positions);
  check("vocab_size", config.vocab_size, saved->vocab_size);
  check("layer_norm_epsilon", config.layer_norm_epsilon, saved->layer_norm_epsilon);
  return config;
}

Gpt2FileConfig read_gpt2_config(const std::string& folder) {
  return read_gpt2_config(read_folder_config(folder));
}

// Put together by hand: the destructor of a JSON library's value allocates, and a save must not end
// the process when memory is short.
std::string gpt2_config_text(const Gpt2FileConfig& config) {
  // GPT-2's own end of text, or the last token of a smaller vocabulary.
  const std::int64_t end_of_text = std::min<std::int64_t>(50256, config.vocab_size - 1);
  const std::pair<const char*, std::string> keys[] = {
      {"activation_function", engine::json_literal("gelu_new")},
      {"architectures", fmt::format("[{}]", engine::json_literal("GPT2LMHeadModel"))},
      {"attn_pdrop", engine::json_literal(config.attn_pdrop)},
      {"bos_token_id", engine::json_literal(end_of_text)},
      {"embd_pdrop", engine::json_literal(config.embd_pdrop)},
      {"eos_token_id", engine::json_literal(end_of_text)},
      {"layer_norm_epsilon", engine::json_literal(config.layer_norm_epsilon)},
      {"model_type", engine::json_literal("gpt2")},
      {"n_embd", engine::json_literal(config.n_embd)},
      {"n_head", engine::json_literal(config.n_head)},
      {"n_inner", "null"},
      {"n_layer", engine::json_literal(config.n_layer)},
      {"n_positions", engine::json_literal(config.n_positions)},
      {"resid_pdrop", engine::json_literal(config.resid_pdrop)},
      {"tie_word_embeddings", engine::json_literal(true)},
      {"torch_dtype", engine::json_literal("float32")},
      {"vocab_size", engine::json_literal(config.vocab_size)},
  };
  std::string text;
  for (const auto& [key, value] : keys) {
    text +=
        fmt::format("{}  {}: {}", text.empty() ? "{\n" : ",\n", engine::json_literal(key), value);
  }
  return text + "\n}\n";
}

}  // namespace tessera::tools
