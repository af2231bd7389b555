// An optimizer that needs whole matrices: each element moves against the sign of its momentum, by
// the learning rate times the largest singular value of the momentum of its whole matrix. Each rank
// keeps its part of the momentum, gathers the matrices of a unit at once, and updates what it owns,
// so bits do not depend on the strategy or the number of ranks. For ranks on the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "shard/optimizer/optimizer.h"

/// By a fixed number of power iterations.
inline double largest_singular_value(const tessera::engine::Tensor& matrix) {
  const std::int64_t rows = matrix.shape().rows(), columns = matrix.numel() / rows;
  std::vector<double> v(static_cast<std::size_t>(columns), 1), next;
  double value = 0;
  for (int iteration = 0; iteration < 16; ++iteration) {
    double v_squares = 0, squares = 0;
    for (const double x : v) v_squares += x * x;
    if (v_squares == 0) return 0;
    next.assign(v.size(), 0);
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* const a = matrix.data<float>() + row * columns;
      double u = 0;  // of matrix x v / |v|
      for (std::size_t i = 0; i < v.size(); ++i) u += a[i] * v[i] / std::sqrt(v_squares);
      for (std::size_t i = 0; i < v.size(); ++i) next[i] += a[i] * u;
      squares += u * u;
    }
    value = std::sqrt(squares);
    v.swap(next);
  }
  return value;
}

class SpectralSign : public tessera::shard::Optimizer {
 public:
  /// `updates`: which parameters; null: all.
  SpectralSign(tessera::shard::Fsdp& fsdp, float decay,
               std::function<bool(const tessera::engine::Parameter&)> updates = {})
      : Optimizer(fsdp, {.name = "spectral sign",
                         .states = {"momentum"},
                         .groups = {{.name = "all"}},
                         .updates = std::move(updates)}),
        decay_(decay) {
    tessera::engine::require(!fsdp.compute().device().is_cuda(),
                             "[spectral_sign] expected ranks on the CPU, got one on a GPU");
  }

 private:
  void update_unit(UnitUpdate& update) override {
    const tessera::shard::Flat& flat = update.flat;
    const float* const sum = flat.grad_sum.device().data<float>();
    float* const master = flat.master.device().data<float>();
    float* const momentum = update.states[0].device().data<float>();
    for (const auto& s : flat.segments) {  // what this rank owns of each parameter
      if (!update.has_gradient(s.parameter)) continue;
      update.stream.launch({"momentum"}, [=, decay = decay_, scale = update.gradient_scale()] {
        for (std::int64_t i = s.shard_begin; i < s.shard_begin + s.numel; ++i) {
          momentum[i] = decay * momentum[i] + scale * sum[i];
        }
      });
    }
    const tessera::engine::Tensor all = gather(update, update.states[0]);
    for (const auto& s : flat.segments) {
      if (!update.has_gradient(s.parameter)) continue;
      const double lr = update.lr(s.parameter);
      const auto matrix =
          all.slice(flat.layout.offset(s.parameter), flat.parameters[s.parameter]->shape);
      update.stream.launch({"spectral_sign"}, [=] {
        const auto step = static_cast<float>(lr * largest_singular_value(matrix));
        for (std::int64_t i = s.shard_begin; i < s.shard_begin + s.numel; ++i) {
          master[i] -= momentum[i] > 0 ? step : momentum[i] < 0 ? -step : 0;
        }
      });
    }
  }

  float decay_;
};
