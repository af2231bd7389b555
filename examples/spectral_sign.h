// An optimizer that needs whole matrices: each element moves against the sign of its momentum, by
// the learning rate times the largest singular value of the momentum of its whole matrix. A rank
// gathers a unit's matrices at once and updates what it owns, so bits do not depend on the strategy
// or the number of ranks, which are on the CPU.
#pragma once

#include <cmath>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "shard/optimizer/optimizer.h"

struct SpectralSign : tessera::shard::Optimizer {
  /// `updates`: which parameters; null: all.
  SpectralSign(tessera::shard::Fsdp& fsdp, float decay,
               std::function<bool(const tessera::engine::Parameter&)> updates = {})
      : Optimizer(fsdp, {"spectral sign", {"momentum"}, {{"all"}}, {}, std::move(updates)}),
        decay(decay) {
    tessera::engine::require(!fsdp.compute().device().is_cuda(), "[spectral_sign] not for GPUs");
  }
  float decay;
  void update_unit(UnitUpdate& update) override {
    const auto& flat = update.flat;
    const auto of = [](const auto& part) { return part.device().template data<float>(); };
    float *sum = of(flat.grad_sum), *master = of(flat.master), *momentum = of(update.states[0]);
    for (const auto& s : flat.segments) {  // what this rank owns of each parameter
      if (!update.has_gradient(s.parameter)) continue;
      update.stream.launch({"momentum"}, [=, decay = decay, scale = update.gradient_scale()] {
        for (auto i = s.shard_begin; i < s.shard_begin + s.numel; ++i)
          momentum[i] = decay * momentum[i] + scale * sum[i];
      });
    }
    const tessera::engine::Tensor all = gather(update, update.states[0]);
    for (const auto& s : flat.segments) {
      if (!update.has_gradient(s.parameter)) continue;
      const auto matrix =
          all.slice(flat.layout.offset(s.parameter), flat.parameters[s.parameter]->shape);
      update.stream.launch({"spectral_sign"}, [=, lr = update.lr(s.parameter)] {
        const auto step = static_cast<float>(lr * largest_singular_value(matrix));
        for (auto i = s.shard_begin; i < s.shard_begin + s.numel; ++i)
          master[i] -= momentum[i] > 0 ? step : momentum[i] < 0 ? -step : 0;
      });
    }
  }
  static double largest_singular_value(const tessera::engine::Tensor& matrix) {
    std::vector<double> v(static_cast<std::size_t>(matrix.numel() / matrix.shape().rows()), 1);
    auto squares = static_cast<double>(v.size());  // |v|^2 of v = A^T A v / |v|
    for (int iteration = 0; iteration < 16 && squares > 0; ++iteration) {
      const std::vector<double> old = std::exchange(v, std::vector<double>(v.size()));
      for (const float* a = matrix.data<float>(); a < matrix.data<float>() + matrix.numel();) {
        const double u = std::inner_product(old.begin(), old.end(), a, 0.0) / std::sqrt(squares);
        for (double& x : v) x += u * *a++;
      }
      squares = std::inner_product(v.begin(), v.end(), v.begin(), 0.0);
    }
    return std::sqrt(std::sqrt(squares));
  }
};
