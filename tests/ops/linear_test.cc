// Linear layer: values and gradients against a naive reference, both layouts, sharing, frozen
// parameters, bf16, what it saves and states.
#include "ops/linear.h"

#include <gtest/gtest.h>

#include <map>

#include "ops/gelu.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::Shape;
using engine::Tape;
using engine::Tensor;
using testing::check_bf16;
using testing::check_gradients;
using testing::expect_close;
using testing::OpCase;
using testing::OpRun;
using testing::run_op;
using testing::Values;

OpCase linear_case(Shape x, std::int64_t out, WeightLayout layout, bool with_bias) {
  const std::int64_t in = x.dim(-1);
  const Shape w = layout == WeightLayout::kInOut ? Shape{in, out} : Shape{out, in};
  OpCase op{.inputs = {x},
            .parameters = {w},
            .build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
              return linear(tape, leaves[0], p[0], with_bias ? &p[1] : nullptr, layout);
            }};
  if (with_bias) op.parameters.push_back({out});
  return op;
}

TEST(LinearTest, GeluIsThatOfTheLayer) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    OpCase op = linear_case({3, 5, 7}, 9, layout, true), apart = op;
    op.build = [=](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
      return linear_gelu(tape, x[0], p[0], p[1], layout);
    };
    apart.build = [=](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
      return gelu(tape, linear(tape, x[0], p[0], &p[1], layout));
    };
    check_gradients(op);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OpRun a = run_op(op, {.dtype = dtype}), b = run_op(apart, {.dtype = dtype});
      EXPECT_EQ(a.y, b.y);
      EXPECT_EQ(a.grads, b.grads);
    }
  }
}

// y, dx, dw, db in double.
struct Reference {
  Values y, dx, dw, db;
  Reference(const OpRun& run, std::int64_t in, std::int64_t out, WeightLayout layout) {
    const Values &x = run.leaves[0], &w = run.leaves[1], &dy = run.dy;
    const std::size_t rows = x.size() / static_cast<std::size_t>(in);
    const auto n = static_cast<std::size_t>(out), k = static_cast<std::size_t>(in);
    y.assign(rows * n, 0), dx.assign(x.size(), 0), dw.assign(w.size(), 0), db.assign(n, 0);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t o = 0; o < n; ++o) {
        y[r * n + o] = run.leaves.size() > 2 ? run.leaves[2][o] : 0;
        db[o] += dy[r * n + o];
        for (std::size_t i = 0; i < k; ++i) {
          const std::size_t at = layout == WeightLayout::kInOut ? i * n + o : o * k + i;
          y[r * n + o] += x[r * k + i] * w[at];
          dx[r * k + i] += dy[r * n + o] * w[at];
          dw[at] += dy[r * n + o] * x[r * k + i];
        }
      }
  }
};

TEST(Linear, EqualsTheNaiveReference) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn})
    for (const bool with_bias : {false, true})
      for (const Shape& x : {Shape{1, 1}, Shape{7}, Shape{2, 3, 31}, Shape{33, 13}, Shape{1025, 3}})
        for (const std::int64_t out : {1, 13, 65}) {
          SCOPED_TRACE(x.str() + " " + std::to_string(out));
          const OpRun run = run_op(linear_case(x, out, layout, with_bias));
          const Reference want(run, x.dim(-1), out, layout);
          expect_close(run.y, want.y, 1e-5, "y");
          expect_close(run.grads[0], want.dx, 1e-5, "dx");
          expect_close(run.grads[1], want.dw, 1e-5, "dw");
          if (with_bias) expect_close(run.grads[2], want.db, 1e-5, "db");
        }
}

TEST(Linear, GradientsWhenSharedFrozenOrOfData) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    check_gradients(linear_case({2, 3, 13}, 31, layout, true));
    check_gradients(linear_case({33, 3}, 1, layout, false));
  }
}

TEST(Linear, Bf16IsOneRoundingFromF32) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    check_bf16(linear_case({2, 3, 13}, 31, layout, true));
    check_bf16(linear_case({1025, 3}, 13, layout, false));
  }
}

TEST(Linear, F32GradientsUnderBf16ValuesAreNotRounded) {
  const OpCase op = linear_case({33, 13}, 31, WeightLayout::kInOut, true);
  const OpRun f32 = run_op(op, {.round_to_bf16 = true, .num_uses = 2});
  const OpRun bf16 = run_op(op, {.dtype = DType::kBF16, .round_to_bf16 = true, .num_uses = 2});
  expect_close(bf16.grads[1], f32.grads[1], 1e-6, "dw");
  expect_close(bf16.grads[2], f32.grads[2], 1e-6, "db");
}

TEST(Linear, NoRowsGiveZeroGradients) {
  const OpRun run = run_op(linear_case({0, 13}, 3, WeightLayout::kInOut, true));
  EXPECT_TRUE(run.y.empty());
  EXPECT_EQ(run.grads[1], Values(39, 0));
  EXPECT_EQ(run.grads[2], Values(3, 0));
}

TEST(Linear, StatesItsWork) {
  testing::LastWorks listener;
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute", {.listener = &listener}));
  Parameter w{.name = "w", .shape = {5, 7}}, b{.name = "b", .shape = {7}};
  engine::materialize({&w, &b}, memory, 1);
  const Tensor x = Tensor::zeros(memory, {2, 3, 5}, DType::kF32);
  tape.watch(x);
  for (const bool accumulate : {false, true}) {
    const Tensor y = linear(tape, x, w, &b), loss = tape.empty({}, DType::kF32, "loss");
    tape.record("sum", loss, [&tape, x, y, accumulate](const Tensor&) {
      tape.pass_grad(y, Tensor::zeros(tape.memory(), y.shape(), DType::kF32));
      if (accumulate) tape.pass_grad(x, Tensor::zeros(tape.memory(), x.shape(), DType::kF32));
    });
    tape.backward(loss);
    const auto expect = [&](std::string_view name, double flops, std::int64_t read,
                            std::int64_t written) {
      listener.expect(name, flops, 4 * read, 4 * written);
    };
    expect("linear.forward", 2 * 6 * 5 * 7 + 42, 30 + 35 + 7, 42);
    expect("linear.backward_x", 2 * 6 * 5 * 7, 42 + 35 + (accumulate ? 30 : 0), 30);
    expect("linear.backward_w", 2 * 6 * 5 * 7, 42 + 30 + (accumulate ? 35 : 0), 35);
    expect("linear.backward_bias", 42, 42 + (accumulate ? 7 : 0), 7);
  }
}

TEST(Linear, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Parameter w{.name = "w", .shape = {5, 7}}, b{.name = "b", .shape = {7}};
  Parameter flat{.name = "flat", .shape = {35}}, half{.name = "half", .shape = {5, 7}};
  engine::materialize({&w, &b, &flat}, memory, 1);
  engine::materialize({&half}, memory, 1, DType::kBF16);
  const Tensor x = Tensor::zeros(memory, {2, 5}, DType::kF32);
  EXPECT_NO_THROW(linear(tape, x, w, &b));
  EXPECT_THROW(linear(tape, x, w, &b, WeightLayout::kOutIn), InvalidArgument);
  EXPECT_THROW(linear(tape, x, w, &flat), InvalidArgument);
  EXPECT_THROW(linear(tape, x, flat, nullptr), InvalidArgument);
  EXPECT_THROW(linear(tape, x, half, nullptr), InvalidArgument);
  EXPECT_THROW(linear(tape, x, w, &half), InvalidArgument);
  EXPECT_THROW(linear(tape, Tensor::zeros(memory, {}, DType::kF32), w, &b), InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops
