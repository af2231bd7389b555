#include "shard/optimizer.h"

#include <cmath>

#include "engine/error.h"

namespace tessera::shard {

using engine::Category;
using engine::require;
using engine::Tensor;

void Optimizer::step(double lr, double clip) {
  begin_update();
  const auto scale = static_cast<float>(fsdp_.mean_scale() * clip);
  std::size_t index = 0;
  for (const auto& unit : fsdp_.units()) {
    for (const Flat& flat : unit->flats()) {
      if (!flat.trainable) continue;
      const std::int64_t nbytes = flat.master.nbytes();
      fsdp_.compute().launch(
          {.name = "optimizer",
           .flops = 12.0 * double(flat.layout.shard_numel()),
           .bytes_read = 4 * nbytes,
           .bytes_written = 3 * nbytes,
           .detail = unit->name()},
          [this, &flat, index, lr, scale] {
            for (const Segment& s : flat.segments) {
              update({*flat.parameters[s.parameter], flat.master.data<float>() + s.shard_begin,
                      flat.grad_sum.data<float>() + s.shard_begin, s.numel, index, s.shard_begin},
                     static_cast<float>(lr), scale);
            }
          });
      ++index;
    }
  }
  fsdp_.parameters_changed();
}

std::vector<Tensor> Optimizer::make_state(const char* name) {
  std::vector<Tensor> state;
  for (const auto& unit : fsdp_.units()) {
    for (const Flat& flat : unit->flats()) {
      if (!flat.trainable) continue;
      state.push_back(Tensor::zeros(fsdp_.memory(), flat.master.shape(), engine::DType::kF32,
                                    unit->name() + "." + name, Category::kOptimizer));
    }
  }
  return state;
}

// SGD
// ----------------------------------------------------------------------------------------------

Sgd::Sgd(Fsdp& fsdp, SgdOptions options) : Optimizer(fsdp), options_(options) {
  require(options.momentum >= 0 && options.momentum < 1,
          "[sgd] expected momentum in [0, 1), got {}", options.momentum);
  if (options.momentum != 0) velocity_ = make_state("velocity");
}

void Sgd::update(const Slice& slice, float lr, float scale) {
  float* __restrict p = slice.p;
  const float* __restrict g = slice.g;
  if (velocity_.empty()) {
    for (std::int64_t i = 0; i < slice.numel; ++i) p[i] -= lr * (g[i] * scale);
    return;
  }
  const auto momentum = static_cast<float>(options_.momentum);
  float* __restrict v = velocity_[slice.flat].data<float>() + slice.shard_begin;
  for (std::int64_t i = 0; i < slice.numel; ++i) {
    v[i] = momentum * v[i] + g[i] * scale;
    p[i] -= lr * v[i];
  }
}

// AdamW
// --------------------------------------------------------------------------------------------

AdamW::AdamW(Fsdp& fsdp, AdamWOptions options) : Optimizer(fsdp), options_(options) {
  require(options.beta1 >= 0 && options.beta1 < 1, "[adamw] expected beta1 in [0, 1), got {}",
          options.beta1);
  require(options.beta2 >= 0 && options.beta2 < 1, "[adamw] expected beta2 in [0, 1), got {}",
          options.beta2);
  require(options.eps > 0, "[adamw] expected eps above 0, got {}", options.eps);
  require(options.weight_decay >= 0, "[adamw] expected weight_decay of at least 0, got {}",
          options.weight_decay);
  m_ = make_state("m");
  v_ = make_state("v");
}

void AdamW::update(const Slice& slice, float lr, float scale) {
  const bool decays = slice.parameter.shape.rank() >= 2;
  const auto keep = static_cast<float>(1 - double{lr} * (decays ? options_.weight_decay : 0));
  const auto beta1 = static_cast<float>(options_.beta1), beta2 = static_cast<float>(options_.beta2);
  const float one_minus_beta1 = 1 - beta1, one_minus_beta2 = 1 - beta2;
  const auto step_size = static_cast<float>(lr / (1 - std::pow(options_.beta1, num_steps_)));
  const auto v_scale = static_cast<float>(1 / std::sqrt(1 - std::pow(options_.beta2, num_steps_)));
  const auto eps = static_cast<float>(options_.eps);
  float* __restrict p = slice.p;
  const float* __restrict g = slice.g;
  float* __restrict m = m_[slice.flat].data<float>() + slice.shard_begin;
  float* __restrict v = v_[slice.flat].data<float>() + slice.shard_begin;
  for (std::int64_t i = 0; i < slice.numel; ++i) {
    const float grad = g[i] * scale;
    m[i] = beta1 * m[i] + one_minus_beta1 * grad;
    v[i] = beta2 * v[i] + one_minus_beta2 * (grad * grad);
    p[i] = p[i] * keep - step_size * m[i] / (std::sqrt(v[i]) * v_scale + eps);
  }
}

}  // namespace tessera::shard
