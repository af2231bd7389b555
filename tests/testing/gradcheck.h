// One harness for all op tests. An OpCase says what an op takes and how to call it; from that come
//
//   check_gradients(op);   // against central differences; sharing, frozen and data leaves
//   check_bf16(op);        // against the f32 op on the same rounded values
//   run_op(op).grads[0]    // for comparisons with a naive reference in double
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/parameter.h"
#include "engine/philox.h"
#include "engine/tape.h"

namespace tessera::testing {

using engine::DType;
using engine::Memory;
using engine::Parameter;
using engine::Shape;
using engine::Tape;
using engine::Tensor;
using Values = std::vector<double>;

/// An op with its leaves: inputs first, then parameters. Their values are normal with standard
/// deviation `scale`, passed through `transform` if there is one.
struct OpCase {
  std::vector<Shape> inputs = {};
  std::vector<Shape> parameters = {};
  std::function<Tensor(Tape&, const std::vector<Tensor>& x, std::vector<Parameter>& p)> build;
  float scale = 1;
  float (*transform)(float) = nullptr;
};

struct RunOptions {
  DType dtype = DType::kF32;       ///< of inputs, parameters and so of the output
  DType grad_dtype = DType::kF32;  ///< of the gradients of parameters
  bool round_to_bf16 = false;      ///< leaves hold bf16 values even when stored as f32
  int num_uses = 1;                ///< how often the op is applied to the same leaves
  std::int64_t offset = 0;         ///< elements before a leaf or parameter gradient in its buffer
  bool on_cuda = false;            ///< on GPU 0 instead of the CPU
  int without_grad = -1;           ///< leaf that is data or frozen
  int nudged_leaf = -1;            ///< leaf with `nudge` added to one element; no backward then
  std::int64_t nudged_index = 0;
  float nudge = 0;
};

/// f = sum over uses u and elements i of r[u][i] y[i], for fixed random r that bf16 can hold.
struct OpRun {
  Values y;
  Values dy;  ///< r of the first use
  double f = 0;
  std::vector<Values> leaves;
  std::vector<Values> grads;  ///< df / dleaf; empty for a leaf without gradient
};

inline Values to_values(const Tensor& t) {
  Values v(static_cast<std::size_t>(t.numel()));
  engine::dispatch_float(t.dtype(), "to_values", [&](auto zero) {
    const auto data = engine::to_vector<decltype(zero)>(t);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = engine::to_f32(data[i]);
  });
  return v;
}

/// Uninitialised, `offset` elements into its buffer.
inline Tensor empty_leaf(const Memory& memory, const Shape& shape, DType dtype,
                         std::int64_t offset) {
  return Tensor::empty(memory, {offset + shape.numel()}, dtype, "leaf").slice(offset, shape);
}

inline Tensor to_tensor(const Memory& memory, const Shape& shape, const std::vector<float>& values,
                        DType dtype, std::int64_t offset = 0) {
  const Tensor t = empty_leaf(memory, shape, dtype, offset);
  engine::dispatch_float(dtype, "to_tensor", [&](auto zero) {
    std::vector<decltype(zero)> converted(values.size());
    engine::cast(converted.data(), values.data(), static_cast<std::int64_t>(values.size()));
    t.copy_from_host(converted.data(), static_cast<std::int64_t>(values.size()));
  });
  return t;
}

inline std::vector<float> random_values(std::int64_t numel, std::uint64_t stream, float scale = 1,
                                        bool round_to_bf16 = false) {
  const engine::RandomStream random{42, stream};
  std::vector<float> v(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i] = scale * random.normal(i);
    if (round_to_bf16) v[i] = engine::BFloat16::from_float(v[i]).to_float();
  }
  return v;
}

/// Runs the op forward and, unless an element is nudged, backward. Memory is poisoned, so reading
/// what nobody wrote shows as NaN.
inline OpRun run_op(const OpCase& op, const RunOptions& options = {}) {
  const engine::Stream stream =
      options.on_cuda ? engine::Stream::cuda("compute", 0) : engine::Stream::inline_cpu("compute");
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
      if (options.round_to_bf16) v = engine::BFloat16::from_float(v).to_float();
    }
    const bool nudged = static_cast<int>(i) == options.nudged_leaf;
    if (nudged) values[static_cast<std::size_t>(options.nudged_index)] += options.nudge;
    const Tensor leaf = to_tensor(memory, shape, values, options.dtype, options.offset);
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
      if (wants_grad)
        parameter.grad = empty_leaf(memory, shape, options.grad_dtype, options.offset);
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
      if (const engine::GradTarget dy = tape.grad_target(ys[u]))
        engine::launch_assign_or_add(tape.stream(), dy.dst, rs[u], dy.accumulate, "weighted_sum");
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

inline double max_abs(const Values& v) {
  double m = 0;
  for (const double e : v) m = std::max(m, std::abs(e));
  return m;
}

/// |got - want| <= tolerance * max|want| everywhere: tolerance is relative to the tensor's range,
/// since elements that cancel keep the error of their terms.
inline void expect_close(const Values& got, const Values& want, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  const double bound = tolerance * max_abs(want) + 1e-12;
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(std::abs(got[i] - want[i]) <= bound)
        << what << "[" << i << "]: expected " << want[i] << " within " << bound << ", got "
        << got[i];
}

struct GradcheckOptions {
  float eps = 1e-2f;
  double tolerance = 3e-3;  ///< of the largest gradient of the leaf
  std::int64_t max_samples =
      12;  ///< elements tried per leaf, spread evenly, first and last included
};

/// Gradients of the f32 op equal central differences, for one and for two uses of the same leaves
/// (so that the second use accumulates); and when one leaf wants no gradient, the others get the
/// same bits and that one gets none.
inline void check_gradients(const OpCase& op, const GradcheckOptions& options = {}) {
  for (const int num_uses : {1, 2}) {
    const OpRun run = run_op(op, {.num_uses = num_uses});
    for (std::size_t leaf = 0; leaf < run.grads.size(); ++leaf) {
      const auto numel = static_cast<std::int64_t>(run.leaves[leaf].size());
      const std::int64_t samples = std::min(numel, options.max_samples);
      ASSERT_EQ(static_cast<std::int64_t>(run.grads[leaf].size()), numel) << "leaf " << leaf;
      const double bound = options.tolerance * std::max(max_abs(run.grads[leaf]), 0.1);
      for (std::int64_t s = 0; s < samples; ++s) {
        RunOptions nudged{.num_uses = num_uses, .nudged_leaf = static_cast<int>(leaf)};
        nudged.nudged_index = samples == 1 ? 0 : s * (numel - 1) / (samples - 1);
        const auto i = static_cast<std::size_t>(nudged.nudged_index);
        nudged.nudge = options.eps;
        const OpRun up = run_op(op, nudged);
        nudged.nudge = -options.eps;
        const OpRun down = run_op(op, nudged);
        const double step = up.leaves[leaf][i] - down.leaves[leaf][i];
        ASSERT_NEAR(run.grads[leaf][i], (up.f - down.f) / step, bound)
            << "leaf " << leaf << ", element " << i << ", uses " << num_uses;
      }
    }
    for (std::size_t without = 0; without < run.grads.size(); ++without) {
      const OpRun fewer =
          run_op(op, {.num_uses = num_uses, .without_grad = static_cast<int>(without)});
      for (std::size_t leaf = 0; leaf < run.grads.size(); ++leaf) {
        ASSERT_EQ(fewer.grads[leaf], leaf == without ? Values{} : run.grads[leaf])
            << "leaf " << leaf << " without gradient of leaf " << without;
      }
    }
  }
}

/// The bf16 op equals the f32 op on the same bf16 values within `tolerance` of the range of each
/// tensor; gradients of parameters both as bf16 and as f32. One rounding is 2^-9.
inline void check_bf16(const OpCase& op, double tolerance = 0x1p-8) {
  for (const int num_uses : {1, 2}) {
    const OpRun want = run_op(op, {.round_to_bf16 = true, .num_uses = num_uses});
    for (const DType grad_dtype : {DType::kF32, DType::kBF16}) {
      const OpRun got = run_op(op, {.dtype = DType::kBF16,
                                    .grad_dtype = grad_dtype,
                                    .round_to_bf16 = true,
                                    .num_uses = num_uses});
      expect_close(got.y, want.y, tolerance, "y");
      for (std::size_t leaf = 0; leaf < want.grads.size(); ++leaf)
        expect_close(got.grads[leaf], want.grads[leaf], num_uses * tolerance,
                     "gradient of leaf " + std::to_string(leaf));
    }
  }
}

}  // namespace tessera::testing
