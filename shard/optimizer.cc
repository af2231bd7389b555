#include "shard/optimizer.h"

#include <cmath>

#include "engine/error.h"
#include "shard/optimizer_cuda.h"

namespace tessera::shard {

using engine::Category;
using engine::require;
using engine::Tensor;

Optimizer::Optimizer(Fsdp& fsdp) : fsdp_(fsdp) {
  if (!fsdp.compute().device().is_cuda()) return;
  scalars_ = Tensor::empty(fsdp.memory(), {kNumScalars}, engine::DType::kF32, "optimizer.scalars",
                           Category::kOptimizer);
}

void Optimizer::step(double lr, const GradNorm& norm, double max_norm) {
  if (fsdp_.compute().device().is_cuda()) {
    step(lr, Clip{.norm = &norm, .max_norm = max_norm});
  } else {
    step(lr, Clip{.factor = clip_scale(norm.value(), max_norm)});
  }
}

void Optimizer::step(double lr, double clip) { step(lr, Clip{.factor = clip}); }

void Optimizer::step(double lr, const Clip& clip) {
  begin_update(lr, clip);
  const auto scale = static_cast<float>(fsdp_.mean_scale() * clip.factor);
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
          },
          [&](const auto& stream) {
            if (!flat.segments.empty()) update_on_gpu(stream, flat, index, lr);
          });
      ++index;
    }
  }
  fsdp_.parameters_changed();
}

ClipCuda Optimizer::to_cuda(const Clip& clip) const {
  return {.mean_scale = fsdp_.mean_scale(),
          .clip = clip.factor,
          .norm = clip.norm == nullptr ? Tensor() : clip.norm->on_device(),
          .max_norm = clip.max_norm};
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

void Sgd::begin_update(double, const Clip& clip) {
  if (!scalars_.defined()) return;
  fsdp_.compute().launch(
      {.name = "optimizer.scalars"}, [] {},
      [&](const auto& stream) { sgd_scalars_cuda(stream, scalars_, to_cuda(clip)); });
}

void Sgd::update_on_gpu(const engine::Stream& stream, const Flat& flat, std::size_t index,
                        double lr) {
  if constexpr (engine::kCudaBuilt) {
    sgd_cuda(stream, {flat.master, flat.grad_sum, flat.segment_table, scalars_},
             velocity_.empty() ? Tensor() : velocity_[index], static_cast<float>(lr),
             static_cast<float>(options_.momentum));
  }
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
  if (!fsdp.compute().device().is_cuda()) return;
  num_steps_on_gpu_ = Tensor::zeros(fsdp.memory(), {1}, engine::DType::kI32, "optimizer.num_steps",
                                    Category::kOptimizer);
}

void AdamW::begin_update(double lr, const Clip& clip) {
  ++num_steps_;
  if (!scalars_.defined()) return;
  fsdp_.compute().launch(
      {.name = "optimizer.scalars"}, [] {},
      [&](const auto& stream) {
        adamw_scalars_cuda(stream, scalars_, to_cuda(clip), num_steps_on_gpu_,
                           {options_.beta1, options_.beta2, options_.eps, options_.weight_decay,
                            double{static_cast<float>(lr)}});
      });
}

void AdamW::update_on_gpu(const engine::Stream& stream, const Flat& flat, std::size_t index,
                          double lr) {
  if constexpr (engine::kCudaBuilt) {
    adamw_cuda(stream, {flat.master, flat.grad_sum, flat.segment_table, scalars_}, m_[index],
               v_[index],
               {options_.beta1, options_.beta2, options_.eps, options_.weight_decay,
                double{static_cast<float>(lr)}});
  }
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
