#include "tools/models/llama.h"

#include <fmt/format.h>

#include <utility>

#include "engine/error.h"
#include "ops/add.h"
#include "ops/dims/slice.h"
#include "ops/embedding.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"
#include "tools/models/projection.h"
#include "tools/models/rope_numbers.h"

namespace tessera::tools {

using engine::Block;
using engine::Init;
using engine::Parameter;
using engine::require;
using engine::Shape;
using engine::Tape;
using engine::Tensor;
using engine::TensorSpec;

namespace {

constexpr const char* kQkv = ".self_attn.qkv_proj";
constexpr std::string_view kQ = "self_attn.q_proj", kK = "self_attn.k_proj",
                           kV = "self_attn.v_proj", kO = "self_attn.o_proj",
                           kGate = "mlp.gate_proj", kUp = "mlp.up_proj", kDown = "mlp.down_proj";

std::int64_t qkv_dim(const LlamaFileConfig& c) { return (c.heads + 2 * c.kv_heads) * c.head_dim; }

ops::RopeOptions rotation(const LlamaFileConfig& c, const Tensor& positions) {
  return {.head_size = c.head_dim,
          .num_heads = c.heads + c.kv_heads,
          .base = c.rope_theta,
          .scaling = ops_scaling(c.rope_scaling),
          .positions = positions};
}

Parameter norm(const std::string& name, std::int64_t size) {
  return {.name = name + ".weight", .shape = {size}, .init = Init::ones()};
}

}  // namespace

void LlamaConfig::validate() const {
  const auto in_range = [](std::int64_t value, std::int64_t max, const char* name) {
    require(value >= 1 && value <= max, "[llama] expected model.{} in [1, {}], got {}", name, max,
            value);
  };
  // Far beyond any use; products of these fit 64 bits.
  in_range(sizes.layers, 10'000, "layers");
  in_range(sizes.heads, 1 << 16, "heads");
  in_range(sizes.kv_heads, 1 << 16, "kv_heads");
  in_range(sizes.dim, 1 << 20, "dim");
  in_range(sizes.mlp_dim, 1 << 24, "mlp_dim");
  in_range(sizes.positions, 1 << 24, "seq");
  in_range(sizes.vocab, 1 << 24, "vocab");
  require(sizes.heads % sizes.kv_heads == 0,
          "[llama] expected model.heads to be a multiple of model.kv_heads ({}), got {}",
          sizes.kv_heads, sizes.heads);
  require(sizes.head_dim >= 2 && sizes.head_dim % 2 == 0 && sizes.head_dim <= 1 << 16,
          "[llama] expected an even size of heads, got {} (model.dim={}, model.heads={})",
          sizes.head_dim, sizes.dim, sizes.heads);
  require(sizes.norm_eps >= 1e-30 && sizes.norm_eps < 1,
          "[llama] expected norm_eps in [1e-30, 1), got {}", sizes.norm_eps);
  check_rotation(sizes.rotation(), "llama");
  require(dropout >= 0 && dropout < 1, "[llama] expected model.dropout in [0, 1), got {}", dropout);
}

struct Llama::Layer {
  Layer(const LlamaFileConfig& c, std::int64_t index)
      : name(fmt::format("layers.{}", index)),
        input_norm(norm(name + ".input_layernorm", c.dim)),
        qkv(name + kQkv, qkv_dim(c), c.dim, c.qkv_bias),
        out(name + ".self_attn.o_proj", c.dim, c.heads * c.head_dim, c.out_bias),
        mlp_norm(norm(name + ".post_attention_layernorm", c.dim)),
        gate(name + ".mlp.gate_proj", c.mlp_dim, c.dim, c.mlp_bias),
        up(name + ".mlp.up_proj", c.mlp_dim, c.dim, c.mlp_bias),
        down(name + ".mlp.down_proj", c.dim, c.mlp_dim, c.mlp_bias) {
    block.name = name;
    block.parameters = {&input_norm};
    qkv.add_to(block);
    for (Parameter* p : {&q_norm, &k_norm}) {
      if (!c.has_qk_norms()) continue;
      p->name = name + (p == &q_norm ? ".self_attn.q_norm.weight" : ".self_attn.k_norm.weight");
      p->shape = {c.head_dim};
      p->init = Init::ones();
      block.parameters.push_back(p);
    }
    out.add_to(block);
    block.parameters.push_back(&mlp_norm);
    for (Projection* p : {&gate, &up, &down}) p->add_to(block);
  }

  std::string name;
  Parameter input_norm;
  Projection qkv;
  Parameter q_norm, k_norm;  // of Qwen3
  Projection out;
  Parameter mlp_norm;
  Projection gate, up, down;
  Block block;
};

Llama::Llama(const LlamaConfig& config)
    : Transformer("llama", (config.validate(), config.sizes.positions), config.dropout),
      config_(config),
      embedding_{.name = "embed_tokens.weight",
                 .shape = {config.sizes.vocab, config.sizes.dim},
                 .init = Init::normal(0.02f)},
      norm_(norm("norm", config.sizes.dim)) {
  for (Parameter* p : {&embedding_, &norm_}) add_to_root(*p);
  if (!config.sizes.tied) {
    head_.emplace();
    head_->name = "lm_head.weight";
    head_->shape = embedding_.shape;
    head_->init = embedding_.init;
    add_to_root(*head_);
  }
  for (std::int64_t i = 0; i < config.sizes.layers; ++i) {
    layers_.push_back(std::make_unique<Layer>(config.sizes, i));
    add_layer(layers_.back()->block);
  }
}

Llama::~Llama() = default;

Tensor Llama::layer_forward(Tape& tape, std::size_t index, const Tensor& x, const Pass& pass) {
  Layer& l = *layers_[index];
  const LlamaFileConfig& c = config_.sizes;
  const auto eps = static_cast<float>(c.norm_eps);
  const Tensor normed = ops::rmsnorm(tape, x, l.input_norm, eps);
  Tensor h = l.qkv(tape, normed);  // (B, T, (H + 2 KV) D)
  h = adapted(tape, index, {kQ, kK, kV}, normed, h, pass);
  if (c.has_qk_norms()) {
    const std::int64_t B = x.dim(0), T = x.dim(1), D = c.head_dim;
    const auto parts = ops::split(tape, h.reshape({B, T, c.heads + 2 * c.kv_heads, D}), 2,
                                  {c.heads, c.kv_heads, c.kv_heads});
    const Tensor q = ops::rmsnorm(tape, parts[0], l.q_norm, eps);
    const Tensor k = ops::rmsnorm(tape, parts[1], l.k_norm, eps);
    h = ops::concat(tape, {q, k, parts[2]}, 2).reshape({B, T, qkv_dim(c)});
  }
  h = attention(tape, index, ops::rope(tape, h, rotation(c, positions(pass))),
                {.num_heads = c.heads, .num_kv_heads = c.kv_heads, .cuda = config_.cuda_attention},
                pass);
  h = adapted(tape, index, {kO}, h, l.out(tape, h), pass);
  h = dropped(tape, h, l.name + ".attn.drop", pass);
  const ops::NormOfSum mid = ops::add_rmsnorm(tape, x, h, l.mlp_norm, eps);
  const Tensor gate = adapted(tape, index, {kGate}, mid.y, l.gate(tape, mid.y), pass);
  const Tensor up = adapted(tape, index, {kUp}, mid.y, l.up(tape, mid.y), pass);
  h = ops::swiglu(tape, gate, up);
  h = adapted(tape, index, {kDown}, h, l.down(tape, h), pass);
  return ops::add(tape, mid.sum, dropped(tape, h, l.name + ".mlp.drop", pass));
}

Tensor Llama::embed(Tape& tape, const Tensor& tokens, const Pass&) {
  return ops::embedding(tape, tokens, embedding_);
}

Tensor Llama::last_norm(Tape& tape, const Tensor& x) {
  return ops::rmsnorm(tape, x, norm_, static_cast<float>(config_.sizes.norm_eps));
}

double Llama::train_flops(std::int64_t tokens) const {
  const LlamaFileConfig& c = config_.sizes;
  const auto t = static_cast<double>(tokens), dim = static_cast<double>(c.dim);
  const auto heads_dim = static_cast<double>(c.heads * c.head_dim);
  const double of_row =
      dim * (static_cast<double>(qkv_dim(c)) + heads_dim + 3 * static_cast<double>(c.mlp_dim));
  const double attention = 4 * heads_dim * t * (t + 1) / 2;
  const double head = 2 * t * dim * static_cast<double>(c.vocab);
  const auto layers = static_cast<double>(c.layers);
  return train_flops_of(tokens, layers * 2 * t * of_row, layers * attention, head);
}

std::vector<LinearModule> Llama::linear_modules() const {
  const LlamaFileConfig& c = config_.sizes;
  const std::int64_t kv = c.kv_heads * c.head_dim, heads = c.heads * c.head_dim;
  return {{std::string(kQ), heads, c.dim, true},  {std::string(kK), kv, c.dim},
          {std::string(kV), kv, c.dim, true},     {std::string(kO), c.dim, heads},
          {std::string(kGate), c.mlp_dim, c.dim}, {std::string(kUp), c.mlp_dim, c.dim},
          {std::string(kDown), c.dim, c.mlp_dim}};
}

ModelLayout Llama::layout() const { return llama_layout(config_.sizes.kind, config_.sizes.tied); }

std::string Llama::config_text() const { return llama_config_text(config_.sizes); }

std::vector<TensorSpec> Llama::file_tensors(const Parameter& p) const {
  const std::size_t at = p.name.find(kQkv);
  if (at == std::string::npos) return LanguageModel::file_tensors(p);
  const LlamaFileConfig& c = config_.sizes;
  const std::string begin = p.name.substr(0, at),
                    end = p.name.substr(at + std::string_view(kQkv).size());
  std::vector<TensorSpec> tensors;
  for (const auto& [name, heads] : {std::pair("q_proj", c.heads), std::pair("k_proj", c.kv_heads),
                                    std::pair("v_proj", c.kv_heads)}) {
    std::vector<std::int64_t> shape = {heads * c.head_dim};
    if (p.shape.rank() == 2) shape.push_back(c.dim);
    tensors.push_back({begin + ".self_attn." + name + end, shape});
  }
  return tensors;
}

}  // namespace tessera::tools
