// Muon (Jordan et al., 2024), made of ops: with Nesterov's momentum of 0.95 as PyTorch has it, no
// weight decay, and the learning rate of Liu et al., arXiv:2502.16982, which is of the size of
// AdamW's. For matrices: what else is trained has another optimizer. Each rank keeps its part of
// the momentum, gathers the directions of a unit at once and updates what it owns, so bits do not
// depend on the strategy or the number of ranks.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

#include "engine/elementwise.h"
#include "engine/tape.h"
#include "ops/add.h"
#include "ops/bmm.h"
#include "ops/rmsnorm.h"
#include "ops/scale.h"
#include "shard/optimizer/optimizer.h"

struct Muon : tessera::shard::Optimizer {
  using Tensor = tessera::engine::Tensor;

  /// `updates`: which parameters, all of them matrices.
  Muon(tessera::shard::Fsdp& fsdp, std::function<bool(const tessera::engine::Parameter&)> updates)
      : Optimizer(fsdp, {"muon", {"momentum"}, {{"matrices"}}, {}, std::move(updates)}) {}

  void update_unit(UnitUpdate& update) override {
    namespace ops = tessera::ops;
    tessera::engine::Tape tape(fsdp().memory(), update.stream);
    const auto& flat = update.flat;
    const auto times = [&](const Tensor& x, double a) { return ops::scale(tape, x, float(a)); };
    const Tensor mine = tape.empty(flat.master.device().shape(), flat.master.dtype(), "directions");
    for (const auto& s : flat.segments) {  // what this rank owns of each parameter
      if (!update.has_gradient(s.parameter)) continue;
      const auto part = [&](const auto& of) { return of.device().slice(s.shard_begin, {s.numel}); };
      const Tensor g = times(part(flat.grad_sum), 0.05 * update.gradient_scale());
      const Tensor m = part(update.states[0]), d = mine.slice(s.shard_begin, {s.numel});
      for (const Tensor& to : {m, d})  // m' = 0.95 m + 0.05 g, d = 0.95 m' + 0.05 g
        launch_assign_or_add(update.stream, to, ops::add(tape, times(m, 0.95), g), false, "muon");
    }
    const Tensor all = gather(update, mine);
    for (const auto& s : flat.segments) {
      if (!update.has_gradient(s.parameter)) continue;
      const std::int64_t M = flat.parameters[s.parameter]->shape.rows();
      const std::int64_t numel = flat.layout.numel(s.parameter), N = numel / M;
      Tensor x = all.slice(flat.layout.offset(s.parameter), {1, numel});
      x = times(ops::rmsnorm(tape, x, 1e-30f), std::pow(numel, -0.5)).reshape({1, M, N});
      for (int i = 0; i < 5; ++i) {  // Newton-Schulz: of U S V^T nearly U V^T
        const Tensor a = ops::bmm(tape, x, x, {.transpose_a = M > N, .transpose_b = M <= N});
        const Tensor b = ops::add(tape, times(a, -4.775), times(ops::bmm(tape, a, a), 2.0315));
        const Tensor y = M > N ? ops::bmm(tape, x, b) : ops::bmm(tape, b, x);
        x = ops::add(tape, times(x, 3.4445), y);
      }
      const double lr = 0.2 * std::sqrt(M > N ? M : N) * update.lr(s.parameter);
      const Tensor step = times(x.reshape({numel}).slice(s.parameter_begin, {s.numel}), -lr);
      const Tensor master = flat.master.device().slice(s.shard_begin, {s.numel});
      launch_assign_or_add(update.stream, master, step, true, "muon");
    }
  }
};
