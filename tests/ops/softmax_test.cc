// Softmax and its logarithm: values and gradients against double, rows apart, what is not finite.
#include "ops/softmax/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/testing/errors.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Stream;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Op = Tensor (*)(Tape&, const Tensor&);

OpCase softmax_case(Op op, Shape shape, float scale = 2) {
  return {.inputs = {shape},
          .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0]); },
          .scale = scale};
}

struct Naive {
  Naive(const OpRun& run, std::size_t cols, bool is_log) : y(run.y.size()), dx(run.y.size()) {
    for (std::size_t first = 0; first < y.size(); first += cols) {
      const double* x = run.leaves[0].data() + first;
      const double* dy = run.dy.data() + first;
      const double max = *std::max_element(x, x + cols);
      double sum = 0, dy_sum = 0, dy_p = 0;
      for (std::size_t c = 0; c < cols; ++c) sum += std::exp(x[c] - max);
      for (std::size_t c = 0; c < cols; ++c) {
        dy_sum += dy[c];
        dy_p += dy[c] * std::exp(x[c] - max) / sum;
      }
      for (std::size_t c = 0; c < cols; ++c) {
        const double p = std::exp(x[c] - max) / sum;
        y[first + c] = is_log ? x[c] - max - std::log(sum) : p;
        dx[first + c] = is_log ? dy[c] - p * dy_sum : p * (dy[c] - dy_p);
      }
    }
  }
  Values y, dx;
};

const Shape kShapes[] = {{1}, {3}, {31}, {33}, {5, 205}, {2, 3, 13}, {7, 1}};

TEST(Softmax, EqualsItsFormulaInDouble) {
  std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
  shapes.insert(shapes.end(), {{3, 1023}, {2, 1024}, {2, 1025}, {2, 70'001}});
  for (const Shape& shape : shapes) {
    for (const float scale : {0.1f, 2.0f, 20.0f}) {
      for (const bool is_log : {false, true}) {
        SCOPED_TRACE(fmt::format("{} by {}, {}", shape.str(), scale, is_log));
        const OpRun run = run_op(softmax_case(is_log ? log_softmax : softmax, shape, scale));
        const Naive want(run, static_cast<std::size_t>(shape.dim(-1)), is_log);
        expect_close(run.y, want.y, 2e-6, "y");
        // A softmax's gradient cancels: against the terms.
        const double bound = 3e-6 * (1 + max_abs(want.dx));
        for (std::size_t i = 0; i < want.dx.size(); ++i)
          ASSERT_NEAR(run.grads[0][i], want.dx[i], bound) << i;
      }
    }
  }
}

TEST(Softmax, GradientsWhenSharedOrOfData) {
  for (const Op op : {softmax, log_softmax})
    for (const Shape& shape : kShapes) check_gradients(softmax_case(op, shape, 1));
}

TEST(Softmax, Bf16IsOneRoundingFromF32) {
  for (const Shape& shape : {Shape{5, 40}, Shape{33}}) {
    check_bf16(softmax_case(softmax, shape));
    check_bf16(softmax_case(log_softmax, shape));
  }
}

class SoftmaxRows : public ::testing::Test {
 protected:
  // y, and dx for a dy of 1, 2, ..., of rows of three.
  std::pair<Values, Values> run(Op op, const std::vector<float>& values, DType dtype) {
    const Shape shape{static_cast<std::int64_t>(values.size()) / 3, 3};
    const Tensor x = to_tensor(memory, shape, values, dtype);
    tape.watch(x);
    const Tensor y = op(tape, x);
    std::vector<float> counting(values.size());
    for (std::size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<float>(i + 1);
    const Tensor loss = tape.empty({}, DType::kF32, "loss");
    tape.record("loss", loss, [&](const Tensor&) {
      tape.pass_grad(y, to_tensor(memory, shape, counting, dtype));
    });
    tape.backward(loss);
    return {to_values(y), to_values(tape.grad(x))};
  }
  Memory memory{{.poison = true}};
  Tape tape{memory, Stream::inline_cpu("compute")};
};

// Rows 1 to 3 have NaN, -infinity everywhere, and +infinity.
TEST_F(SoftmaxRows, WhatIsNotANumberStaysInItsRow) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Op op : {softmax, log_softmax}) {
      const auto [y, dx] = run(
          op, {1, 2, 4, 1, NAN, 2, -kInfinity, -kInfinity, -kInfinity, 3, kInfinity, 1, 1, 2, 4},
          dtype);
      for (std::size_t i = 0; i < 15; ++i) {
        EXPECT_EQ(std::isnan(y[i]), i >= 3 && i < 12) << i;
        EXPECT_EQ(std::isnan(dx[i]), i >= 3 && i < 12) << i;
      }
      for (std::size_t c = 0; c < 3; ++c) EXPECT_EQ(y[c], y[12 + c]) << "a row depends on others";
    }
  }
}

TEST_F(SoftmaxRows, MaskedElementsHaveNoPart) {
  const std::vector<float> x = {0, -kInfinity, 0, -kInfinity, 7, -kInfinity};
  const auto [p, dp] = run(softmax, x, DType::kF32);
  EXPECT_EQ(p, (Values{0.5, 0, 0.5, 0, 1, 0}));
  EXPECT_EQ(dp, (Values{-0.5, 0, 0.5, 0, 0, 0}));
  const auto [y, dy] = run(log_softmax, x, DType::kF32);
  EXPECT_EQ(y[1], -kInfinity);
  EXPECT_EQ(y[4], 0);
  EXPECT_NEAR(y[0], std::log(0.5), 1e-7);
  EXPECT_EQ(dy[1], 2);
  EXPECT_EQ(dy[4], 5 - (4 + 5 + 6));
}

TEST_F(SoftmaxRows, LargeNumbersAreStable) {
  const std::vector<float> x = {1e30f, 1e4f, -1e30f, 1e4f, 1e4f + 1, 0};
  const auto [p, dp] = run(softmax, x, DType::kF32);
  EXPECT_EQ(p[0], 1);
  EXPECT_NEAR(p[3], 1 / (1 + std::exp(1.0)), 1e-7);
  const auto [y, dy] = run(log_softmax, x, DType::kF32);
  EXPECT_EQ(y[2], -2e30f);
  EXPECT_NEAR(y[5], -1e4 - 1 - std::log(1 + std::exp(-1.0)), 2e-3);
}

// Of 3 x 5 f32: an exponential and four more operations each.
TEST(Softmax, StatesItsWork) {
  for (const int num_uses : {1, 2}) {
    const std::int64_t added = num_uses - 1;
    LastWorks works;
    run_op(softmax_case(softmax, {3, 5}), {.num_uses = num_uses, .listener = &works});
    works.expect("softmax.forward", 15 * 23, 60, 60);
    works.expect("softmax.backward", 15 * (4 + double(added)), 120 + 60 * added, 60);
    run_op(softmax_case(log_softmax, {3, 5}), {.num_uses = num_uses, .listener = &works});
    works.expect("log_softmax.forward", 15 * 23, 60, 60);
    works.expect("log_softmax.backward", 15 * (22 + double(added)), 120 + 60 * added, 60);
  }
}

TEST(Softmax, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const auto error = [&](Op op, const Shape& shape, DType dtype) {
    const Tensor x = Tensor::zeros(memory, shape, dtype, "scores");
    return error_of<InvalidArgument>([&] { op(tape, x); });
  };
  EXPECT_TRUE(has(error(softmax, {2, 3}, DType::kI32), {"[softmax]", "f32 or bf16", "scores"}));
  EXPECT_TRUE(has(error(log_softmax, {2, 3}, DType::kI32), {"[log_softmax]", "i32"}));
  EXPECT_TRUE(has(error(softmax, {}, DType::kF32), {"(.., C)", "got ()"}));
  EXPECT_TRUE(has(error(log_softmax, {3, 0}, DType::kF32), {"(.., C)", "(3, 0)"}));
  EXPECT_EQ(softmax(tape, Tensor::zeros(memory, {0, 3}, DType::kF32)).shape(), (Shape{0, 3}));
}

}  // namespace
}  // namespace tessera::ops
