// Functions of one number, and sub, div and where: values and slopes against double, gradients,
// sharing, bf16, special values, what is refused.
#include "ops/elementwise/unary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ops/elementwise/div.h"
#include "ops/elementwise/sub.h"
#include "ops/elementwise/where.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const Shape kShapes[] = {{1}, {3}, {31}, {33}, {5, 205}, {2, 3, 13}};

using Op = Tensor (*)(Tape&, const Tensor&);
using Function = double (*)(double);

double positive(double x) { return std::abs(x) + 0.25; }

struct Unary {
  std::string name;
  Op op;
  Function value, slope;
  float (*transform)(float) = nullptr;
};

const std::vector<Unary>& unary_ops() {
  static const std::vector<Unary> all = {
      {"tanh", tanh, [](double x) { return std::tanh(x); },
       [](double x) { return 1 / (std::cosh(x) * std::cosh(x)); }},
      {"sigmoid", sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); },
       [](double x) { return 1 / ((1 + std::exp(-x)) * (1 + std::exp(x))); }},
      {"silu", silu, [](double x) { return x / (1 + std::exp(-x)); },
       [](double x) {
         const double s = 1 / (1 + std::exp(-x));
         return s * (1 + x * (1 - s));
       }},
      {"exp", exp, [](double x) { return std::exp(x); }, [](double x) { return std::exp(x); }},
      {"log", log, [](double x) { return std::log(x); }, [](double x) { return 1 / x; },
       [](float x) { return static_cast<float>(positive(x)); }},
      {"softplus", softplus, [](double x) { return std::log1p(std::exp(x)); },
       [](double x) { return 1 / (1 + std::exp(-x)); }},
  };
  return all;
}

OpCase case_of(const Unary& u, Shape shape, float scale) {
  return {.inputs = {shape},
          .build = [op = u.op](Tape& tape, const auto& x, auto&) { return op(tape, x[0]); },
          .scale = scale,
          .transform = u.transform};
}

TEST(Unary, EqualsItsFormulaInDouble) {
  for (const Unary& u : unary_ops()) {
    SCOPED_TRACE(u.name);
    for (const float scale : {0.01f, 1.0f, 6.0f}) {
      const OpRun run = run_op(case_of(u, {1025}, scale));
      for (std::size_t i = 0; i < run.y.size(); ++i) {
        const double x = run.leaves[0][i], y = u.value(x), dx = run.dy[i] * u.slope(x);
        ASSERT_NEAR(run.y[i], y, 5e-7 * std::abs(y) + 1e-37) << x;
        ASSERT_NEAR(run.grads[0][i], dx, 1e-6 * std::abs(dx) + 3e-7 * (u.op == silu)) << x;
      }
    }
  }
}

TEST(Unary, GradientsWhenSharedOrOfData) {
  for (const Unary& u : unary_ops()) {
    SCOPED_TRACE(u.name);
    for (const Shape& shape : kShapes) check_gradients(case_of(u, shape, 1));
    check_bf16(case_of(u, {5, 205}, 2));
  }
}

// A value of y and a slope for each x.
void expect_at(Op op, const std::vector<float>& x, const std::vector<double>& y,
               const std::vector<double>& slope) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const auto count = static_cast<std::int64_t>(x.size());
  const Tensor in = Tensor::from<float>(memory, {count}, x);
  tape.watch(in);
  const Tensor out = op(tape, in);
  const Values got = to_values(out);
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  const Tensor ones =
      Tensor::from<float>(memory, {count}, std::vector<float>(static_cast<std::size_t>(count), 1));
  tape.record("loss", loss, [&](const Tensor&) { tape.pass_grad(out, ones); });
  tape.backward(loss);
  const Values dx = to_values(tape.grad(in));
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(y[i])) {
      EXPECT_TRUE(std::isnan(got[i])) << x[i];
    } else {
      EXPECT_EQ(got[i], y[i]) << x[i];
    }
    EXPECT_TRUE(std::isnan(slope[i]) ? std::isnan(dx[i]) : dx[i] == slope[i])
        << "slope at " << x[i] << ": " << dx[i];
  }
}

TEST(Unary, SpecialValues) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {-kInf, -200, 0, 200, kInf, NAN};
  expect_at(tanh, x, {-1, -1, 0, 1, 1, NAN}, {0, 0, 1, 0, 0, NAN});
  expect_at(sigmoid, x, {0, 0, 0.5, 1, 1, NAN}, {0, 0, 0.25, 0, 0, NAN});
  expect_at(exp, x, {0, 0, 1, kInfinity, kInfinity, NAN}, {0, 0, 1, kInfinity, kInfinity, NAN});
  const double ln2 = static_cast<double>(std::log(2.0f));
  expect_at(softplus, x, {0, 0, ln2, 200, kInfinity, NAN}, {0, 0, 0.5, 1, 1, NAN});
  expect_at(log, {-1, 0, 1, kInf, NAN, -0.0f}, {NAN, -kInfinity, 0, kInfinity, NAN, -kInfinity},
            {-1, kInfinity, 1, 0, NAN, -kInfinity});
  const auto unit = [](Tape& t, const Tensor& v) { return clamp(t, v, -1, 2); };
  expect_at(unit, {-kInf, -2, -1, 0.5, 2, 3, kInf, NAN}, {-1, -1, -1, 0.5, 2, 2, 2, NAN},
            {0, 0, 1, 1, 1, 0, 0, 0});
}

// Some number far from each eighth, where slopes may change.
float between_eighths(float x) { return (std::floor(8 * x) + 0.5f) / 8; }

TEST(Clamp, GradientsWhenSharedOrOfData) {
  OpCase op{.inputs = {{5, 205}}, .build = [](Tape& tape, const auto& x, auto&) {
              return clamp(tape, x[0], -0.5f, 0.75f);
            }};
  const OpRun run = run_op(op);
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    const double x = run.leaves[0][i];
    EXPECT_EQ(run.y[i], std::clamp(x, -0.5, 0.75));
    EXPECT_EQ(run.grads[0][i], x >= -0.5 && x <= 0.75 ? run.dy[i] : 0);
  }
  check_bf16(op);
  op.transform = between_eighths;
  for (const Shape& shape : kShapes) {
    op.inputs = {shape};
    check_gradients(op);
  }
}

// Binary ops ------------------------------------------------------------------------------------

OpCase binary_case(Tensor (*op)(Tape&, const Tensor&, const Tensor&), Shape shape) {
  return {.inputs = {shape, shape},
          .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0], x[1]); }};
}

OpCase quotient_case(Shape shape) {
  OpCase op = binary_case(div, shape);
  op.transform = [](float x) { return x < 0 ? x - 0.5f : x + 0.5f; };
  return op;
}

TEST(Sub, GradientsWhenSharedOrOfData) {
  const OpRun run = run_op(binary_case(sub, {1025}));
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    EXPECT_EQ(run.y[i], static_cast<float>(run.leaves[0][i] - run.leaves[1][i]));
    EXPECT_EQ(run.grads[0][i], run.dy[i]);
    EXPECT_EQ(run.grads[1][i], -run.dy[i]);
  }
  for (const Shape& shape : kShapes) check_gradients(binary_case(sub, shape));
  check_bf16(binary_case(sub, {5, 205}));
  const OpCase twice{.inputs = {{33}},
                     .build = [](Tape& t, const auto& x, auto&) { return sub(t, x[0], x[0]); }};
  EXPECT_EQ(run_op(twice).grads[0], Values(33, 0));
}

TEST(Div, GradientsWhenSharedOrOfData) {
  const OpRun run = run_op(quotient_case({1025}));
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    const double a = run.leaves[0][i], b = run.leaves[1][i], dy = run.dy[i];
    EXPECT_EQ(run.y[i], static_cast<float>(a / b));
    EXPECT_EQ(run.grads[0][i], static_cast<float>(dy / b));
    EXPECT_NEAR(run.grads[1][i], -dy * a / (b * b), 3e-7 * std::abs(dy * a / (b * b)));
  }
  for (const Shape& shape : kShapes) check_gradients(quotient_case(shape));
  check_bf16(quotient_case({5, 205}));
}

TEST(Where, TakesOneOfTwoAndItsGradient) {
  const OpCase op{.inputs = {{1025}, {1025}, {1025}},
                  .build = [](Tape& tape, const auto& x, auto&) {
                    return where(tape, clamp(tape, x[0], 0, 9), x[1], x[2]);
                  }};
  const OpRun run = run_op(op);
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    const bool first = run.leaves[0][i] > 0;
    EXPECT_EQ(run.y[i], run.leaves[first ? 1 : 2][i]);
    EXPECT_EQ(run.grads[1][i], first ? run.dy[i] : 0);
    EXPECT_EQ(run.grads[2][i], first ? 0 : run.dy[i]);
  }
  check_bf16(op);
}

// What is chosen by its own sign, too.
TEST(Where, GradientsWhenSharedOrOfData) {
  for (const Shape& shape : kShapes) {
    const OpCase op{.inputs = {shape, shape},
                    .build = [](Tape& tape, const auto& x,
                                auto&) { return where(tape, clamp(tape, x[0], 0, 9), x[0], x[1]); },
                    .transform = between_eighths};
    check_gradients(op);
    check_bf16(op);
  }
}

// So that log(where(x > 0, x, 1)) and the like have gradients.
TEST(Where, NothingComesFromWhatIsNotChosen) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor condition = Tensor::from<float>(memory, {2}, std::vector{1.0f, 0.0f});
  const Tensor a = Tensor::from<float>(memory, {2}, std::vector{2.0f, NAN});
  const Tensor b = Tensor::from<float>(memory, {2}, std::vector{INFINITY, 3.0f});
  EXPECT_EQ(to_values(where(tape, condition, a, b)), (Values{2, 3}));
}

TEST(Unary, RefuseWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor a = Tensor::zeros(memory, {2, 3}, DType::kF32);
  const Tensor turned = Tensor::zeros(memory, {3, 2}, DType::kF32);
  const Tensor half = Tensor::zeros(memory, {2, 3}, DType::kBF16);
  const Tensor integers = Tensor::zeros(memory, {2, 3}, DType::kI32);
  for (const Unary& u : unary_ops()) EXPECT_THROW(u.op(tape, integers), InvalidArgument) << u.name;
  EXPECT_THROW(clamp(tape, integers, 0, 1), InvalidArgument);
  EXPECT_THROW(clamp(tape, a, 1, 0), InvalidArgument);
  EXPECT_THROW(clamp(tape, a, NAN, 0), InvalidArgument);
  for (const auto op : {sub, div}) {
    EXPECT_THROW(op(tape, a, turned), InvalidArgument);
    EXPECT_THROW(op(tape, a, half), InvalidArgument);
    EXPECT_THROW(op(tape, integers, integers), InvalidArgument);
  }
  EXPECT_THROW(where(tape, turned, a, a), InvalidArgument);
  EXPECT_THROW(where(tape, a, a, half), InvalidArgument);
  EXPECT_THROW(where(tape, integers, a, a), InvalidArgument);
}

// Of six elements, f32; the second time a gradient is added to that of the first.
TEST(Unary, StatesItsWork) {
  LastWorks works;
  run_op(binary_case(div, {2, 3}), {.num_uses = 2, .listener = &works});
  works.expect("div.forward", 6, 48, 24);
  works.expect("div.backward", 6 * (4 + 1), 72 + 24, 24);
  run_op(case_of(unary_ops()[0], {2, 3}, 1), {.listener = &works});
  EXPECT_GT(works.works["tanh.forward"].flops, 60);
  works.expect("tanh.forward", works.works["tanh.forward"].flops, 24, 24);
  works.expect("tanh.backward", works.works["tanh.backward"].flops, 48, 24);
}

}  // namespace
}  // namespace tessera::ops
