#include "tools/models/gpt.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "engine/error.h"
#include "ops/add.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/gelu.h"
#include "ops/layernorm.h"
#include "ops/linear.h"
#include "tools/huggingface/gpt2_files.h"

namespace tessera::tools {

using engine::Block;
using engine::Init;
using engine::Parameter;
using engine::require;
using engine::Shape;
using engine::Tape;
using engine::Tensor;

void GptConfig::validate() const {
  // Far beyond any use; products of these fit 64 bits.
  const auto in_range = [](std::int64_t value, std::int64_t max, const char* name) {
    require(value >= 1 && value <= max, "[gpt] expected model.{} in [1, {}], got {}", name, max,
            value);
  };
  in_range(layers, 10'000, "layers");
  in_range(heads, 1 << 20, "heads");
  in_range(dim, 1 << 20, "dim");
  in_range(seq, 1 << 24, "seq");
  in_range(vocab, 1 << 24, "vocab");
  require(dim % heads == 0, "[gpt] expected model.dim to be a multiple of model.heads ({}), got {}",
          heads, dim);
  // As its config.json may say.
  require(norm_eps >= 1e-30 && norm_eps < 1, "[gpt] expected norm_eps in [1e-30, 1), got {}",
          norm_eps);
  require(dropout >= 0 && dropout < 1, "[gpt] expected model.dropout in [0, 1), got {}", dropout);
}

GptConfig gpt_preset(const std::string& name) {
  const auto gpt2 = [](std::int64_t layers, std::int64_t heads, std::int64_t dim) {
    return GptConfig{.layers = layers, .heads = heads, .dim = dim, .seq = 1024, .vocab = 50257};
  };
  if (name == "small") return {};
  if (name == "gpt2") return gpt2(12, 12, 768);
  if (name == "gpt2-medium") return gpt2(24, 16, 1024);
  if (name == "gpt2-large") return gpt2(36, 20, 1280);
  if (name == "gpt2-xl") return gpt2(48, 25, 1600);
  engine::fail("[gpt] expected a preset of {}, got '{}'", fmt::join(gpt_preset_names(), ", "),
               name);
}

const std::vector<std::string>& gpt_preset_names() {
  static const std::vector<std::string> kNames = {"small", "gpt2", "gpt2-medium", "gpt2-large",
                                                  "gpt2-xl"};
  return kNames;
}

namespace {

constexpr std::string_view kAttn = "attn.c_attn", kAttnProj = "attn.c_proj", kFc = "mlp.c_fc",
                           kProj = "mlp.c_proj";

Parameter parameter(std::string name, const Shape& shape, Init init) {
  return {.name = std::move(name), .shape = shape, .init = init};
}

}  // namespace

struct Gpt::Layer {
  std::string name;
  Parameter ln_1_weight, ln_1_bias, attn_weight, attn_bias, attn_proj_weight, attn_proj_bias;
  Parameter ln_2_weight, ln_2_bias, fc_weight, fc_bias, proj_weight, proj_bias;
  Block block;

  // Residual projections start smaller by sqrt(2 layers), as GPT-2's.
  Layer(const GptConfig& c, std::int64_t index)
      : name(fmt::format("h.{}", index)),
        ln_1_weight(parameter(name + ".ln_1.weight", {c.dim}, Init::ones())),
        ln_1_bias(parameter(name + ".ln_1.bias", {c.dim}, Init::zeros())),
        attn_weight(
            parameter(name + ".attn.c_attn.weight", {c.dim, 3 * c.dim}, Init::normal(0.02f))),
        attn_bias(parameter(name + ".attn.c_attn.bias", {3 * c.dim}, Init::zeros())),
        attn_proj_weight(parameter(name + ".attn.c_proj.weight", {c.dim, c.dim}, residual_init(c))),
        attn_proj_bias(parameter(name + ".attn.c_proj.bias", {c.dim}, Init::zeros())),
        ln_2_weight(parameter(name + ".ln_2.weight", {c.dim}, Init::ones())),
        ln_2_bias(parameter(name + ".ln_2.bias", {c.dim}, Init::zeros())),
        fc_weight(parameter(name + ".mlp.c_fc.weight", {c.dim, 4 * c.dim}, Init::normal(0.02f))),
        fc_bias(parameter(name + ".mlp.c_fc.bias", {4 * c.dim}, Init::zeros())),
        proj_weight(parameter(name + ".mlp.c_proj.weight", {4 * c.dim, c.dim}, residual_init(c))),
        proj_bias(parameter(name + ".mlp.c_proj.bias", {c.dim}, Init::zeros())),
        block{
            name,
            {&ln_1_weight, &ln_1_bias, &attn_weight, &attn_bias, &attn_proj_weight, &attn_proj_bias,
             &ln_2_weight, &ln_2_bias, &fc_weight, &fc_bias, &proj_weight, &proj_bias}} {}

  static Init residual_init(const GptConfig& c) {
    return Init::normal(0.02f / std::sqrt(2.0f * static_cast<float>(c.layers)));
  }
};

Gpt::Gpt(const GptConfig& config)
    : Transformer("gpt", (config.validate(), config.seq), config.dropout),
      config_(config),
      wte_(parameter("wte.weight", {config.vocab, config.dim}, Init::normal(0.02f))),
      wpe_(parameter("wpe.weight", {config.seq, config.dim}, Init::normal(0.02f))),
      ln_f_weight_(parameter("ln_f.weight", {config.dim}, Init::ones())),
      ln_f_bias_(parameter("ln_f.bias", {config.dim}, Init::zeros())) {
  for (Parameter* p : {&wte_, &wpe_, &ln_f_weight_, &ln_f_bias_}) add_to_root(*p);
  for (std::int64_t i = 0; i < config.layers; ++i) {
    layers_.push_back(std::make_unique<Layer>(config, i));
    add_layer(layers_.back()->block);
  }
}

Gpt::~Gpt() = default;

Tensor Gpt::layer_forward(Tape& tape, std::size_t index, const Tensor& x, const Pass& pass) {
  Layer& l = *layers_[index];
  const auto eps = static_cast<float>(config_.norm_eps);
  const Tensor normed = ops::layernorm(tape, x, l.ln_1_weight, &l.ln_1_bias, eps);
  Tensor h = ops::linear(tape, normed, l.attn_weight, &l.attn_bias);  // (B, T, 3C)
  h = adapted(tape, index, {kAttn}, normed, h, pass);
  h = attention(tape, index, h, {.num_heads = config_.heads, .cuda = config_.cuda_attention}, pass);
  h = adapted(tape, index, {kAttnProj}, h,
              ops::linear(tape, h, l.attn_proj_weight, &l.attn_proj_bias), pass);
  h = dropped(tape, h, l.name + ".attn.drop", pass);
  const ops::NormOfSum mid = ops::add_layernorm(tape, x, h, l.ln_2_weight, &l.ln_2_bias, eps);
  h = mlp(tape, index, mid.y, pass);
  return ops::add(tape, mid.sum, dropped(tape, h, l.name + ".mlp.drop", pass));
}

Tensor Gpt::mlp(Tape& tape, std::size_t index, const Tensor& x, const Pass& pass) {
  Layer& l = *layers_[index];
  if (!has_adapter({kFc, kProj}))
    return ops::gelu_mlp(tape, x, l.fc_weight, l.fc_bias, l.proj_weight, &l.proj_bias);
  Tensor h = adapted(tape, index, {kFc}, x, ops::linear(tape, x, l.fc_weight, &l.fc_bias), pass);
  h = ops::gelu(tape, h);
  return adapted(tape, index, {kProj}, h, ops::linear(tape, h, l.proj_weight, &l.proj_bias), pass);
}

Tensor Gpt::embed(Tape& tape, const Tensor& tokens, const Pass& pass) {
  if (const Tensor places = positions(pass); places.defined()) {
    const Tensor at = ops::embedding(tape, places.reshape(tokens.shape()), wpe_);
    return ops::add(tape, ops::embedding(tape, tokens, wte_), at);
  }
  return ops::token_position_embedding(tape, tokens, wte_, wpe_);
}

Tensor Gpt::last_norm(Tape& tape, const Tensor& x) {
  return ops::layernorm(tape, x, ln_f_weight_, &ln_f_bias_, static_cast<float>(config_.norm_eps));
}

double Gpt::train_flops(std::int64_t tokens) const {
  const auto t = static_cast<double>(tokens), c = static_cast<double>(config_.dim);
  const double linear = 24 * t * c * c;  // C x 3C, C x C, C x 4C, 4C x C
  const double attention = 4 * c * t * (t + 1) / 2;
  const double head = 2 * t * c * static_cast<double>(config_.vocab);
  const auto layers = static_cast<double>(config_.layers);
  return train_flops_of(tokens, layers * linear, layers * attention, head);
}

std::vector<LinearModule> Gpt::linear_modules() const {
  const std::int64_t dim = config_.dim;
  return {{std::string(kAttn), 3 * dim, dim, true},
          {std::string(kAttnProj), dim, dim},
          {std::string(kFc), 4 * dim, dim},
          {std::string(kProj), dim, 4 * dim}};
}

ModelLayout Gpt::layout() const { return gpt2_layout(); }

std::string Gpt::config_text() const {
  return gpt2_config_text({.n_layer = config_.layers,
                           .n_head = config_.heads,
                           .n_embd = config_.dim,
                           .n_positions = config_.seq,
                           .vocab_size = config_.vocab,
                           .layer_norm_epsilon = config_.norm_eps,
                           .resid_pdrop = config_.dropout,
                           .embd_pdrop = config_.dropout,
                           .attn_pdrop = 0});
}

}  // namespace tessera::tools
