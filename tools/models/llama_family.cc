#include <memory>

#include "engine/error.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/llama_files.h"
#include "tools/models/family.h"
#include "tools/models/llama.h"
#include "tools/models/rope_numbers.h"

namespace tessera::tools {
namespace {

class LlamaFamily : public ModelFamily {
 public:
  explicit LlamaFamily(const std::string& kind)
      : ModelFamily(kind, llama_layout(kind, /*tied=*/false).title) {}

  std::vector<Number> numbers() const override {
    return {{"kv_heads", "heads of keys and values, each shared by equally many of model.heads"},
            {"head_dim"},  // 0: dim / heads
            {"mlp_dim", "width between the matrices of an MLP"},
            {"norm_eps"},
            {"rope_theta"},
            {"rope_scaling"},
            {"rope_factor"},
            {"rope_low"},
            {"rope_high"},
            {"rope_positions"},
            {"tied"},
            {"qkv_bias"},
            {"out_bias"},
            {"mlp_bias"}};
  }

  std::vector<Preset> presets() const override {
    std::vector<Preset> presets;
    const auto add = [&](const char* name, LlamaFileConfig config) {
      config.kind = this->name();
      presets.push_back({name, config_of(config)});
    };
    if (name() == "llama") {
      add("smollm2-135m", {.layers = 30,
                           .heads = 9,
                           .kv_heads = 3,
                           .head_dim = 64,
                           .dim = 576,
                           .mlp_dim = 1536,
                           .positions = 8192,
                           .vocab = 49152,
                           .norm_eps = 1e-5,
                           .rope_theta = 100'000,
                           .tied = true});
      add("tinyllama-1.1b", {.layers = 22,
                             .heads = 32,
                             .kv_heads = 4,
                             .head_dim = 64,
                             .dim = 2048,
                             .mlp_dim = 5632,
                             .positions = 2048,
                             .vocab = 32000,
                             .norm_eps = 1e-5});
      add("llama3.2-1b", {.layers = 16,
                          .heads = 32,
                          .kv_heads = 8,
                          .head_dim = 64,
                          .dim = 2048,
                          .mlp_dim = 8192,
                          .positions = 131'072,
                          .vocab = 128'256,
                          .norm_eps = 1e-5,
                          .rope_theta = 500'000,
                          .rope_scaling = {"llama3", 32, 1, 4, 8192},
                          .tied = true});
      LlamaFileConfig llama3{.layers = 32,
                             .heads = 32,
                             .kv_heads = 8,
                             .head_dim = 128,
                             .dim = 4096,
                             .mlp_dim = 14'336,
                             .positions = 8192,
                             .vocab = 128'256,
                             .norm_eps = 1e-5,
                             .rope_theta = 500'000};
      add("llama3-8b", llama3);
      llama3.layers = 80;
      llama3.heads = 64;
      llama3.dim = 8192;
      llama3.mlp_dim = 28'672;
      add("llama3-70b", llama3);
    }
    if (name() == "qwen2") {
      add("qwen2.5-0.5b", {.layers = 24,
                           .heads = 14,
                           .kv_heads = 2,
                           .head_dim = 64,
                           .dim = 896,
                           .mlp_dim = 4864,
                           .positions = 32'768,
                           .vocab = 151'936,
                           .rope_theta = 1'000'000,
                           .tied = true,
                           .qkv_bias = true});
    }
    if (name() == "qwen3") {
      add("qwen3-0.6b", {.layers = 28,
                         .heads = 16,
                         .kv_heads = 8,
                         .head_dim = 128,
                         .dim = 1024,
                         .mlp_dim = 3072,
                         .positions = 40'960,
                         .vocab = 151'936,
                         .rope_theta = 1'000'000,
                         .tied = true});
    }
    return presets;
  }

  std::unique_ptr<LanguageModel> make(const ModelConfig& config) const override {
    const auto& numbers = config.numbers;
    const auto is_set = [&](const char* key) { return numbers.at(key) != 0; };
    const std::int64_t head_dim = config.whole("head_dim");
    engine::require(head_dim != 0 || (config.heads > 0 && config.dim % config.heads == 0),
                    "[llama] expected model.dim to be a multiple of model.heads ({}), got {}",
                    config.heads, config.dim);
    return std::make_unique<Llama>(
        LlamaConfig{.sizes = {.kind = name(),
                              .layers = config.layers,
                              .heads = config.heads,
                              .kv_heads = config.whole("kv_heads"),
                              .head_dim = head_dim != 0 ? head_dim : config.dim / config.heads,
                              .dim = config.dim,
                              .mlp_dim = config.whole("mlp_dim"),
                              .positions = config.seq,
                              .vocab = config.vocab,
                              .norm_eps = numbers.at("norm_eps"),
                              .rope_theta = numbers.at("rope_theta"),
                              .rope_scaling = rope_scaling_of(numbers),
                              .tied = is_set("tied"),
                              .qkv_bias = is_set("qkv_bias"),
                              .out_bias = is_set("out_bias"),
                              .mlp_bias = is_set("mlp_bias")},
                    .dropout = config.dropout,
                    .cuda_attention = config.cuda_attention});
  }

  ModelConfig read_config(const FolderConfig& folder) const override {
    return config_of(read_llama_config(folder, name()));
  }

 private:
  ModelConfig config_of(const LlamaFileConfig& c) const {
    const bool follows = name() != "qwen3" && c.heads * c.head_dim == c.dim;
    ModelConfig config{.family = this,
                       .layers = c.layers,
                       .heads = c.heads,
                       .dim = c.dim,
                       .seq = c.positions,
                       .vocab = c.vocab,
                       .numbers = {{"kv_heads", static_cast<double>(c.kv_heads)},
                                   // One way of saying each: texts of checkpoints are compared.
                                   {"head_dim", follows ? 0.0 : static_cast<double>(c.head_dim)},
                                   {"mlp_dim", static_cast<double>(c.mlp_dim)},
                                   {"norm_eps", c.norm_eps},
                                   {"rope_theta", c.rope_theta},
                                   {"tied", c.tied ? 1 : 0},
                                   {"qkv_bias", c.qkv_bias ? 1 : 0},
                                   {"out_bias", c.out_bias ? 1 : 0},
                                   {"mlp_bias", c.mlp_bias ? 1 : 0}}};
    config.numbers.merge(numbers_of(c.rope_scaling));
    return config;
  }
};

}  // namespace

const std::vector<const ModelFamily*>& llama_families() {
  static const LlamaFamily llama("llama"), mistral("mistral"), qwen2("qwen2"), qwen3("qwen3");
  static const std::vector<const ModelFamily*> all = {&llama, &mistral, &qwen2, &qwen3};
  return all;
}

}  // namespace tessera::tools
