#include "tools/models/gpt_neox.h"

#include <fmt/format.h>

#include "engine/error.h"
#include "ops/add.h"
#include "ops/dims/permute.h"
#include "ops/dims/slice.h"
#include "ops/embedding.h"
#include "ops/gelu.h"
#include "ops/layernorm.h"
#include "ops/linear.h"
#include "ops/rope.h"
#include "tools/models/projection.h"
#include "tools/models/rope_numbers.h"

namespace tessera::tools {

using engine::Block;
using engine::Init;
using engine::Parameter;
using engine::require;
using engine::Tape;
using engine::Tensor;

namespace {

constexpr std::string_view kQkv = "attention.query_key_value", kOut = "attention.dense",
                           kUp = "mlp.dense_h_to_4h", kDown = "mlp.dense_4h_to_h";

// The config, if it is in range.
const GptNeoxFileConfig& checked(const GptNeoxFileConfig& c) {
  const auto in_range = [](std::int64_t value, std::int64_t max, const char* name) {
    require(value >= 1 && value <= max, "[gpt_neox] expected model.{} in [1, {}], got {}", name,
            max, value);
  };
  // Far beyond any use; products of these fit 64 bits.
  in_range(c.layers, 10'000, "layers");
  in_range(c.heads, 1 << 16, "heads");
  in_range(c.dim, 1 << 20, "dim");
  in_range(c.mlp_dim, 1 << 24, "mlp_dim");
  in_range(c.positions, 1 << 24, "seq");
  in_range(c.vocab, 1 << 24, "vocab");
  require(c.dim % c.heads == 0,
          "[gpt_neox] expected model.dim to be a multiple of model.heads ({}), got {}", c.heads,
          c.dim);
  require(c.rotation.part > 0 && c.rotation.part <= 1,
          "[gpt_neox] expected rotary_pct above 0 and at most 1, got {}", c.rotation.part);
  require(c.rotary_dims() >= 2 && c.rotary_dims() % 2 == 0,
          "[gpt_neox] expected an even number of elements of a head to turn, got {} of {} "
          "(model.dim={}, model.heads={})",
          c.rotary_dims(), c.head_dim(), c.dim, c.heads);
  require(c.norm_eps >= 1e-30 && c.norm_eps < 1,
          "[gpt_neox] expected norm_eps in [1e-30, 1), got {}", c.norm_eps);
  require(c.hidden_dropout >= 0 && c.hidden_dropout < 1,
          "[gpt_neox] expected model.dropout in [0, 1), got {}", c.hidden_dropout);
  check_rotation(c.rotation, "gpt_neox");
  return c;
}

Parameter norm_weight(const std::string& name, std::int64_t size) {
  return {.name = name + ".weight", .shape = {size}, .init = Init::ones()};
}

Parameter norm_bias(const std::string& name, std::int64_t size) {
  return {.name = name + ".bias", .shape = {size}};
}

struct LayerNorm {
  LayerNorm(const std::string& name, std::int64_t size)
      : weight(norm_weight(name, size)), bias(norm_bias(name, size)) {}

  Parameter weight, bias;
};

}  // namespace

struct GptNeox::Layer {
  Layer(const GptNeoxFileConfig& c, std::int64_t index)
      : name(fmt::format("layers.{}", index)),
        input_norm(name + ".input_layernorm", c.dim),
        mlp_norm(name + ".post_attention_layernorm", c.dim),
        qkv(name + ".attention.query_key_value", 3 * c.dim, c.dim, c.attention_bias),
        out(name + ".attention.dense", c.dim, c.dim, c.attention_bias),
        up(name + ".mlp.dense_h_to_4h", c.mlp_dim, c.dim, true),
        down(name + ".mlp.dense_4h_to_h", c.dim, c.mlp_dim, true) {
    block.name = name;
    for (LayerNorm* norm : {&input_norm, &mlp_norm}) {
      block.parameters.push_back(&norm->weight);
      block.parameters.push_back(&norm->bias);
    }
    for (Projection* p : {&qkv, &out, &up, &down}) p->add_to(block);
  }

  std::string name;
  LayerNorm input_norm, mlp_norm;
  Projection qkv, out, up, down;
  Block block;
};

GptNeox::GptNeox(const GptNeoxFileConfig& config, ops::CudaAttention cuda_attention)
    : Transformer("gpt_neox", checked(config).positions, config.hidden_dropout),
      config_(config),
      cuda_attention_(cuda_attention),
      embedding_{.name = "embed_in.weight",
                 .shape = {config.vocab, config.dim},
                 .init = Init::normal(0.02f)},
      norm_weight_(norm_weight("final_layer_norm", config.dim)),
      norm_bias_(norm_bias("final_layer_norm", config.dim)) {
  for (Parameter* p : {&embedding_, &norm_weight_, &norm_bias_}) add_to_root(*p);
  if (!config.tied) {
    head_.emplace();
    head_->name = "embed_out.weight";
    head_->shape = embedding_.shape;
    head_->init = embedding_.init;
    add_to_root(*head_);
  }
  for (std::int64_t i = 0; i < config.layers; ++i) {
    layers_.push_back(std::make_unique<Layer>(config, i));
    add_layer(layers_.back()->block);
  }
}

GptNeox::~GptNeox() = default;

Tensor GptNeox::embed(Tape& tape, const Tensor& tokens, const Pass&) {
  return ops::embedding(tape, tokens, embedding_);
}

// Files have the queries, keys and values of one head after those of another, ops::attention() all
// queries first.
Tensor GptNeox::attention_branch(Tape& tape, std::size_t index, const Tensor& x, const Pass& pass) {
  Layer& l = *layers_[index];
  const std::int64_t B = x.dim(0), T = x.dim(1), H = config_.heads, D = config_.head_dim();
  const std::int64_t turned = config_.rotary_dims();
  Tensor h = adapted(tape, index, {kQkv}, x, l.qkv(tape, x), pass).reshape({B, T, H, 3, D});
  h = ops::permute(tape, h, {0, 1, 3, 2, 4}).reshape({B, T, 3 * H, D});
  std::vector<Tensor> parts = {h};
  if (turned < D) parts = ops::split(tape, h, 3, {turned, D - turned});
  parts[0] = ops::rope(tape, parts[0],
                       {.head_size = turned,
                        .num_heads = 2 * H,  // queries and keys
                        .base = config_.rotation.theta,
                        .scaling = ops_scaling(config_.rotation.scaling),
                        .positions = positions(pass)});
  h = turned < D ? ops::concat(tape, parts, 3) : parts[0];
  h = attention(tape, index, h.reshape({B, T, 3 * H * D}),
                {.num_heads = H, .cuda = cuda_attention_}, pass);
  return adapted(tape, index, {kOut}, h, l.out(tape, h), pass);
}

Tensor GptNeox::mlp(Tape& tape, std::size_t index, const Tensor& x, const Pass& pass) {
  Layer& l = *layers_[index];
  if (config_.tanh_gelu && !has_adapter({kUp, kDown})) {
    return ops::gelu_mlp(tape, x, l.up.weight, *l.up.bias, l.down.weight, &*l.down.bias,
                         ops::WeightLayout::kOutIn);
  }
  const Tensor up = adapted(tape, index, {kUp}, x, l.up(tape, x), pass);
  const Tensor h =
      ops::gelu(tape, up, config_.tanh_gelu ? ops::GeluKind::kTanh : ops::GeluKind::kErf);
  return adapted(tape, index, {kDown}, h, l.down(tape, h), pass);
}

Tensor GptNeox::layer_forward(Tape& tape, std::size_t index, const Tensor& x, const Pass& pass) {
  Layer& l = *layers_[index];
  const auto eps = static_cast<float>(config_.norm_eps);
  Tensor a = attention_branch(
      tape, index, ops::layernorm(tape, x, l.input_norm.weight, &l.input_norm.bias, eps), pass);
  a = dropped(tape, a, l.name + ".attn.drop", pass);
  const auto mlp_of = [&](const Tensor& normed) {
    return dropped(tape, mlp(tape, index, normed, pass), l.name + ".mlp.drop", pass);
  };
  if (!config_.parallel) {
    const ops::NormOfSum mid =
        ops::add_layernorm(tape, x, a, l.mlp_norm.weight, &l.mlp_norm.bias, eps);
    return ops::add(tape, mid.sum, mlp_of(mid.y));
  }
  const Tensor m = mlp_of(ops::layernorm(tape, x, l.mlp_norm.weight, &l.mlp_norm.bias, eps));
  return ops::add(tape, ops::add(tape, m, a), x);
}

Tensor GptNeox::last_norm(Tape& tape, const Tensor& x) {
  return ops::layernorm(tape, x, norm_weight_, &norm_bias_, static_cast<float>(config_.norm_eps));
}

double GptNeox::train_flops(std::int64_t tokens) const {
  const auto t = static_cast<double>(tokens), dim = static_cast<double>(config_.dim);
  const double of_row = dim * (4 * dim + 2 * static_cast<double>(config_.mlp_dim));
  const double attention = 4 * dim * t * (t + 1) / 2;
  const double head = 2 * t * dim * static_cast<double>(config_.vocab);
  const auto layers = static_cast<double>(config_.layers);
  return train_flops_of(tokens, layers * 2 * t * of_row, layers * attention, head);
}

std::vector<LinearModule> GptNeox::linear_modules() const {
  const std::int64_t dim = config_.dim, mlp_dim = config_.mlp_dim;
  return {{std::string(kQkv), 3 * dim, dim, true},
          {std::string(kOut), dim, dim},
          {std::string(kUp), mlp_dim, dim},
          {std::string(kDown), dim, mlp_dim}};
}

ModelLayout GptNeox::layout() const { return gpt_neox_layout(config_.tied); }

std::string GptNeox::config_text() const { return gpt_neox_config_text(config_); }

}  // namespace tessera::tools
