// Pointwise ops and the sum of all elements: values and slopes against double, sharing, data
// inputs, bf16.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/add.h"
#include "ops/gelu.h"
#include "ops/mul.h"
#include "ops/pointwise.h"
#include "ops/pointwise_functions.h"
#include "ops/relu.h"
#include "ops/scale.h"
#include "ops/sum.h"
#include "ops/swiglu.h"
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
using testing::OpCase;
using testing::OpRun;
using testing::run_op;
using testing::Values;

OpCase unary_case(const std::function<Tensor(Tape&, const Tensor&)>& op, Shape shape,
                  float scale = 2) {
  return {.inputs = {shape},
          .build = [op](Tape& tape, const std::vector<Tensor>& x,
                        std::vector<Parameter>&) { return op(tape, x[0]); },
          .scale = scale};
}

OpCase binary_case(Tensor (*op)(Tape&, const Tensor&, const Tensor&), Shape shape) {
  return {.inputs = {shape, shape},
          .build = [op](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>&) {
            return op(tape, x[0], x[1]);
          }};
}

OpCase gelu_case(GeluKind kind, Shape shape, float scale = 2) {
  return unary_case([kind](Tape& t, const Tensor& x) { return gelu(t, x, kind); }, shape, scale);
}

const Shape kShapes[] = {{1}, {3}, {31}, {33}, {5, 205}, {2, 3, 13}};

TEST(Gelu, EqualsItsFormulaInDouble) {
  const auto erf_phi = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  const auto tanh_u = [](double x) { return std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); };
  for (const float scale : {0.01f, 1.0f, 4.0f}) {
    const OpRun exact = run_op(gelu_case(GeluKind::kErf, {1025}, scale));
    const OpRun tanh = run_op(gelu_case(GeluKind::kTanh, {1025}, scale));
    for (std::size_t i = 0; i < 1025; ++i) {
      const double x = exact.leaves[0][i], t = std::tanh(tanh_u(x));
      const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
      const double du = std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
      const double bound = 4e-7 * std::abs(x);
      EXPECT_NEAR(exact.y[i], x * erf_phi(x), bound);
      EXPECT_NEAR(tanh.y[i], 0.5 * x * (1 + t), bound);
      EXPECT_NEAR(exact.grads[0][i], exact.dy[i] * (erf_phi(x) + x * density), 1e-6 * 4);
      EXPECT_NEAR(tanh.grads[0][i], tanh.dy[i] * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du),
                  1e-6 * 4);
    }
  }
}

TEST(Gelu, FarOutItIsZeroOrIdentity) {
  for (const GeluKind kind : {GeluKind::kTanh, GeluKind::kErf}) {
    OpCase op = gelu_case(kind, {64});
    op.transform = [](float v) { return v < 0 ? -50 + v : 50 + v; };
    const OpRun run = run_op(op);
    for (std::size_t i = 0; i < run.y.size(); ++i) {
      const double x = run.leaves[0][i];
      EXPECT_NEAR(run.y[i], x < 0 ? 0 : x, 1e-30);
      EXPECT_NEAR(run.grads[0][i], x < 0 ? 0 : run.dy[i], 1e-30);
    }
  }
}

TEST(Gelu, GradientsWhenSharedOrOfData) {
  for (const GeluKind kind : {GeluKind::kTanh, GeluKind::kErf})
    for (const Shape& shape : kShapes) check_gradients(gelu_case(kind, shape));
}

TEST(Gelu, Bf16IsOneRoundingFromF32) {
  check_bf16(gelu_case(GeluKind::kTanh, {5, 205}));
  check_bf16(gelu_case(GeluKind::kErf, {5, 205}));
}

TEST(Gelu, NanStays) {
  for (const GeluKind kind : {GeluKind::kTanh, GeluKind::kErf}) {
    OpCase op = gelu_case(kind, {9});
    op.transform = [](float) { return NAN; };
    for (const double y : run_op(op).y) EXPECT_TRUE(std::isnan(y));
  }
}

TEST(Relu, KeepsWhatIsAboveZero) {
  OpCase op = unary_case(relu, {1025});
  op.transform = [](float v) { return std::abs(v) < 1 ? 0 : v; };
  const OpRun run = run_op(op), twice = run_op(op, {.num_uses = 2});
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    const double x = run.leaves[0][i];
    EXPECT_EQ(run.y[i], x > 0 ? x : 0);
    EXPECT_EQ(run.grads[0][i], x > 0 ? run.dy[i] : 0);
    if (x <= 0) {
      EXPECT_EQ(twice.grads[0][i], 0);
    }
  }
  check_bf16(op);
  op.transform = [](float) { return NAN; };
  for (const double y : run_op(op).y) EXPECT_TRUE(std::isnan(y));
  op.transform = [](float v) { return v < 0 ? v - 1 : v + 1; };  // away from the kink
  check_gradients(op);
}

TEST(Swiglu, EqualsItsFormulaInDouble) {
  const OpRun run = run_op(binary_case(swiglu, {1025}));
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    const double g = run.leaves[0][i], u = run.leaves[1][i], s = 1 / (1 + std::exp(-g));
    const double bound = 1e-6 * (1 + std::abs(run.dy[i] * u));
    EXPECT_NEAR(run.y[i], g * s * u, bound);
    EXPECT_NEAR(run.grads[0][i], run.dy[i] * u * s * (1 + g * (1 - s)), bound);
    EXPECT_NEAR(run.grads[1][i], run.dy[i] * g * s, 1e-6 * (1 + std::abs(run.dy[i] * g)));
  }
}

TEST(Swiglu, GradientsWhenSharedOrOfData) {
  for (const Shape& shape : kShapes) check_gradients(binary_case(swiglu, shape));
  check_bf16(binary_case(swiglu, {5, 205}));
}

TEST(Swiglu, GateAndUpMayBeTheSame) {
  check_gradients(unary_case([](Tape& t, const Tensor& x) { return swiglu(t, x, x); }, {33}, 1));
}

TEST(Add, GradientsWhenSharedOrOfData) {
  const OpRun run = run_op(binary_case(add, {1025}));
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    EXPECT_EQ(run.y[i], static_cast<float>(run.leaves[0][i] + run.leaves[1][i]));
    EXPECT_EQ(run.grads[0][i], run.dy[i]);
    EXPECT_EQ(run.grads[1][i], run.dy[i]);
  }
  for (const Shape& shape : kShapes) check_gradients(binary_case(add, shape));
  check_bf16(binary_case(add, {5, 205}));
}

TEST(Add, BothSidesMayBeTheSame) {
  check_gradients(unary_case([](Tape& t, const Tensor& x) { return add(t, x, x); }, {33}));
  // A residual block: x reaches the sum directly and through another op.
  check_gradients(unary_case([](Tape& t, const Tensor& x) { return add(t, x, gelu(t, x)); }, {33}));
}

TEST(Mul, GradientsWhenSharedOrOfData) {
  const OpRun run = run_op(binary_case(mul, {1025}));
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    EXPECT_EQ(run.y[i], static_cast<float>(run.leaves[0][i] * run.leaves[1][i]));
    EXPECT_EQ(run.grads[0][i], static_cast<float>(run.dy[i] * run.leaves[1][i]));
    EXPECT_EQ(run.grads[1][i], static_cast<float>(run.dy[i] * run.leaves[0][i]));
  }
  for (const Shape& shape : kShapes) check_gradients(binary_case(mul, shape));
  check_gradients(unary_case([](Tape& t, const Tensor& x) { return mul(t, x, x); }, {33}));
  check_bf16(binary_case(mul, {5, 205}));
}

TEST(Scale, GradientsWhenSharedOrOfData) {
  const auto third = [](Tape& t, const Tensor& x) { return scale(t, x, 1.0f / 3); };
  const OpRun run = run_op(unary_case(third, {1025}));
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    EXPECT_EQ(run.y[i], static_cast<float>(double{1.0f / 3} * run.leaves[0][i]));
    EXPECT_EQ(run.grads[0][i], static_cast<float>(double{1.0f / 3} * run.dy[i]));
  }
  for (const Shape& shape : kShapes) check_gradients(unary_case(third, shape));
  check_bf16(unary_case(third, {5, 205}));
}

TEST(Sum, IsTheNearestF32OfTheSumInDouble) {
  for (const std::int64_t numel : {0, 1, 3, 1023, 1024, 1025, 65'536, 65'537, 200'003}) {
    const OpRun run = run_op(unary_case(sum, {numel}));
    double total = 0;
    for (const double x : run.leaves[0]) total += x;
    ASSERT_EQ(run.y.size(), 1u);
    EXPECT_NEAR(run.y[0], total, 0x1p-24 * std::abs(total) + 1e-9) << numel;
    EXPECT_EQ(run.grads[0], Values(static_cast<std::size_t>(numel), run.dy[0])) << numel;
  }
  // Terms that an f32 sum would lose.
  OpCase op = unary_case(sum, {4097});
  op.transform = [](float v) { return v < 0 ? 1.0f : 0x1p25f; };
  const OpRun run = run_op(op);
  double total = 0;
  for (const double x : run.leaves[0]) total += x;
  EXPECT_EQ(run.y[0], static_cast<float>(total));
}

TEST(Sum, GradientsWhenSharedOrOfData) {
  for (const Shape& shape : kShapes) check_gradients(unary_case(sum, shape));
  check_bf16(unary_case(sum, {5, 205}));
}

TEST(Pointwise, RefuseWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor a = Tensor::zeros(memory, {2, 3}, DType::kF32);
  const Tensor b = Tensor::zeros(memory, {3, 2}, DType::kF32);
  const Tensor half = Tensor::zeros(memory, {2, 3}, DType::kBF16);
  const Tensor integers = Tensor::zeros(memory, {2, 3}, DType::kI32);
  for (const auto op : {add, mul, swiglu}) {
    EXPECT_THROW(op(tape, a, b), InvalidArgument);
    EXPECT_THROW(op(tape, a, half), InvalidArgument);
    EXPECT_THROW(op(tape, integers, integers), InvalidArgument);
  }
  EXPECT_THROW(gelu(tape, integers), InvalidArgument);
  EXPECT_THROW(relu(tape, integers), InvalidArgument);
  EXPECT_THROW(scale(tape, integers, 2), InvalidArgument);
  EXPECT_THROW(sum(tape, integers), InvalidArgument);
  const Tensor small = Tensor::zeros(memory, {5}, DType::kF32);
  for (const Tensor& other : {small, half}) {
    EXPECT_THROW(
        launch_pointwise(tape.stream(), {"product", 1}, Pointwise<Product>{{a}, {a, other}}),
        InvalidArgument);
  }
}

// Of six elements, f32; the second time a gradient is added to that of the first.
TEST(Pointwise, StatesItsWork) {
  for (const int num_uses : {1, 2}) {
    const std::int64_t added = num_uses - 1;
    testing::LastWorks works;
    run_op(binary_case(mul, {2, 3}), {.num_uses = num_uses, .listener = &works});
    works.expect("mul.forward", 6, 48, 24);
    works.expect("mul.backward", 6 + 6 * double(added), 48 + 24 * added, 24);
    run_op(unary_case([](Tape& t, const Tensor& x) { return sum(t, x); }, {2, 3}),
           {.num_uses = num_uses, .listener = &works});
    works.expect("sum.forward", 6, 24, 4);
    works.expect("sum.backward", 6 * double(added), 4 + 24 * added, 24);
  }
}

}  // namespace
}  // namespace tessera::ops
