#include "engine/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/philox.h"

namespace tessera::engine::gradcheck {
namespace {

// Uninitialised, `offset` elements into its buffer.
Tensor empty_leaf(const Memory& memory, const Shape& shape, DType dtype, std::int64_t offset) {
  return Tensor::empty(memory, {offset + shape.numel()}, dtype, "leaf").slice(offset, shape);
}

}  // namespace

Values to_values(const Tensor& t) {
  Values v(static_cast<std::size_t>(t.numel()));
  dispatch_float(t.dtype(), "to_values", [&](auto zero) {
    const auto data = to_vector<decltype(zero)>(t);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = to_f32(data[i]);
  });
  return v;
}

Tensor to_tensor(const Memory& memory, const Shape& shape, const std::vector<float>& values,
                 DType dtype, std::int64_t offset) {
  const Tensor t = empty_leaf(memory, shape, dtype, offset);
  copy_from_floats(t, values);
  return t;
}

std::vector<float> random_values(std::int64_t numel, std::uint64_t stream, float scale,
                                 bool round_to_bf16) {
  const RandomStream random{42, stream};
  std::vector<float> v(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i] = scale * random.normal(i);
    if (round_to_bf16) v[i] = BFloat16::from_float(v[i]).to_float();
  }
  return v;
}

OpRun run_op(const OpCase& op, const RunOptions& options) {
  const Stream stream = options.on_cuda
                            ? Stream::cuda("compute", 0, {.listener = options.listener})
                            : Stream::inline_cpu("compute", {.listener = options.listener});
  const Memory memory(stream, {.poison = true});
  Tape tape(memory, stream);
  OpRun run;
  std::vector<Tensor> x;
  std::vector<Parameter> p(op.parameters.size());
  const std::size_t num_leaves = op.inputs.size() + p.size();
  for (std::size_t i = 0; i < num_leaves; ++i) {
    const bool is_input = i < op.inputs.size();
    const Shape& shape = is_input ? op.inputs[i] : op.parameters[i - op.inputs.size()];
    std::vector<float> values = random_values(shape.numel(), i, op.scale);
    for (float& v : values) {
      if (op.transform != nullptr) v = op.transform(v);
      if (options.round_to_bf16) v = BFloat16::from_float(v).to_float();
    }
    const bool nudged = static_cast<int>(i) == options.nudged_leaf;
    if (nudged) values[static_cast<std::size_t>(options.nudged_index)] += options.nudge;
    const bool is_moved = options.offset_leaf < 0 || static_cast<int>(i) == options.offset_leaf;
    const std::int64_t offset = is_moved ? options.offset : 0;
    const Tensor leaf = to_tensor(memory, shape, values, options.dtype, offset);
    run.leaves.push_back(to_values(leaf));
    const bool wants_grad = static_cast<int>(i) != options.without_grad;
    if (is_input) {
      x.push_back(leaf);
      if (wants_grad) tape.watch(leaf);
    } else {
      Parameter& parameter = p[i - op.inputs.size()];
      parameter.name = fmt::format("p{}", i - op.inputs.size());
      parameter.shape = shape;
      parameter.value = leaf;
      parameter.trainable = wants_grad;
      if (wants_grad) parameter.grad = empty_leaf(memory, shape, options.grad_dtype, offset);
    }
  }

  std::vector<Tensor> ys, rs;
  for (int u = 0; u < options.num_uses; ++u) {
    const Tensor y = op.build(tape, x, p);
    const auto stream = 1000 + static_cast<std::uint64_t>(u);
    const Tensor r =
        to_tensor(memory, y.shape(), random_values(y.numel(), stream, 1, true), y.dtype());
    const Values y_values = to_values(y), r_values = to_values(r);
    for (std::size_t i = 0; i < y_values.size(); ++i) run.f += y_values[i] * r_values[i];
    if (u == 0) run.y = y_values, run.dy = r_values;
    ys.push_back(y);
    rs.push_back(r);
  }
  if (options.nudged_leaf >= 0) return run;

  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("weighted_sum", loss, [&tape, ys, rs](const Tensor&) {
    for (std::size_t u = 0; u < ys.size(); ++u) {
      if (const GradTarget dy = tape.grad_target(ys[u]))
        launch_assign_or_add(tape.stream(), dy.dst, rs[u], dy.accumulate, "weighted_sum");
    }
  });
  tape.backward(loss);
  for (std::size_t i = 0; i < num_leaves; ++i) {
    const bool is_input = i < op.inputs.size();
    const Tensor grad = is_input ? tape.grad(x[i]) : p[i - op.inputs.size()].grad;
    run.grads.push_back(grad.defined() ? to_values(grad) : Values{});
  }
  return run;
}

double max_abs(const Values& v) {
  double m = 0;
  for (const double e : v) m = std::max(m, std::abs(e));
  return m;
}

void check_close(const Values& got, const Values& want, double tolerance, std::string_view what) {
  require<Error>(got.size() == want.size(), "[gradcheck] expected {} elements, got {} ({})",
                 want.size(), got.size(), what);
  const double bound = tolerance * max_abs(want) + 1e-12;
  for (std::size_t i = 0; i < got.size(); ++i) {
    require<Error>(std::abs(got[i] - want[i]) <= bound,
                   "[gradcheck] expected {} within {}, got {} ({}[{}])", want[i], bound, got[i],
                   what, i);
  }
}

void check_gradients(const OpCase& op, const GradcheckOptions& options) {
  for (const int num_uses : {1, 2}) {
    const OpRun run = run_op(op, {.num_uses = num_uses});
    for (std::size_t leaf = 0; leaf < run.grads.size(); ++leaf) {
      const auto numel = static_cast<std::int64_t>(run.leaves[leaf].size());
      const std::int64_t samples = std::min(numel, options.max_samples);
      require<Error>(static_cast<std::int64_t>(run.grads[leaf].size()) == numel,
                     "[gradcheck] expected a gradient of {} elements, got {} (leaf {})", numel,
                     run.grads[leaf].size(), leaf);
      const double bound = options.tolerance * std::max(max_abs(run.grads[leaf]), 0.1);
      for (std::int64_t s = 0; s < samples; ++s) {
        RunOptions nudged{.num_uses = num_uses, .nudged_leaf = static_cast<int>(leaf)};
        nudged.nudged_index = samples == 1 ? 0 : s * (numel - 1) / (samples - 1);
        const auto i = static_cast<std::size_t>(nudged.nudged_index);
        nudged.nudge = options.eps;
        const OpRun up = run_op(op, nudged);
        nudged.nudge = -options.eps;
        const OpRun down = run_op(op, nudged);
        const double slope = (up.f - down.f) / (up.leaves[leaf][i] - down.leaves[leaf][i]);
        require<Error>(std::abs(run.grads[leaf][i] - slope) <= bound,
                       "[gradcheck] expected a gradient of {} within {}, got {} (leaf {}, element "
                       "{}, {} uses)",
                       slope, bound, run.grads[leaf][i], leaf, i, num_uses);
      }
    }
    for (std::size_t without = 0; without < run.grads.size(); ++without) {
      const OpRun fewer =
          run_op(op, {.num_uses = num_uses, .without_grad = static_cast<int>(without)});
      for (std::size_t leaf = 0; leaf < run.grads.size(); ++leaf) {
        require<Error>(fewer.grads[leaf] == (leaf == without ? Values{} : run.grads[leaf]),
                       "[gradcheck] expected {} when leaf {} wants no gradient, got another (leaf "
                       "{}, {} uses)",
                       leaf == without ? "no gradient" : "the same gradient", without, leaf,
                       num_uses);
      }
    }
  }
}

void check_bf16(const OpCase& op, double tolerance) {
  for (const int num_uses : {1, 2}) {
    const OpRun want = run_op(op, {.round_to_bf16 = true, .num_uses = num_uses});
    for (const DType grad_dtype : {DType::kF32, DType::kBF16}) {
      const OpRun got = run_op(op, {.dtype = DType::kBF16,
                                    .grad_dtype = grad_dtype,
                                    .round_to_bf16 = true,
                                    .num_uses = num_uses});
      check_close(got.y, want.y, tolerance, "y");
      for (std::size_t leaf = 0; leaf < want.grads.size(); ++leaf)
        check_close(got.grads[leaf], want.grads[leaf], num_uses * tolerance,
                    fmt::format("gradient of leaf {}", leaf));
    }
  }
}

}  // namespace tessera::engine::gradcheck
