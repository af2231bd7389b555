// Losses of two tensors against double; casts; values without their gradient.
#include "ops/losses/losses.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/elementwise/cast.h"
#include "ops/mul.h"
#include "tests/testing/errors.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;

using Loss = Tensor (*)(Tape&, const Tensor&, const Tensor&);

// From 0 to 1.
float target_of(std::int64_t i) { return static_cast<float>(i * 37 % 101) / 100; }

// Of x, and of targets that are data.
OpCase case_of(Loss loss, Shape shape) {
  return {.inputs = {shape}, .build = [loss](Tape& tape, const auto& x, auto&) {
            std::vector<float> values;
            for (std::int64_t i = 0; i < x[0].numel(); ++i) values.push_back(target_of(i));
            const Tensor target = Tensor::from<float>(tape.memory(), x[0].shape(), values);
            return loss(tape, x[0], cast(tape, target, x[0].dtype()));
          }};
}

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

TEST(Mse, IsTheMeanOfSquares) {
  const OpCase op{.inputs = {{5, 41}, {5, 41}},
                  .build = [](Tape& t, const auto& x, auto&) { return mse(t, x[0], x[1]); }};
  const OpRun run = run_op(op);
  double sum = 0;
  for (std::size_t i = 0; i < 205; ++i) {
    const double d = run.leaves[0][i] - run.leaves[1][i];
    sum += d * d;
    EXPECT_NEAR(run.grads[0][i], run.dy[0] * 2 * d / 205, 1e-6);
    EXPECT_NEAR(run.grads[1][i], -run.dy[0] * 2 * d / 205, 1e-6);
  }
  EXPECT_NEAR(run.y[0], sum / 205, 1e-6 * sum / 205);
  check_gradients(op);
}

TEST(BceWithLogits, IsThatOfTheSigmoid) {
  for (const float scale : {1.0f, 8.0f}) {
    OpCase op = case_of(bce_with_logits, {5, 41});
    op.scale = scale;
    const OpRun run = run_op(op);
    double sum = 0;
    for (std::size_t i = 0; i < 205; ++i) {
      const double x = run.leaves[0][i], t = target_of(static_cast<std::int64_t>(i));
      sum += t * std::log1p(std::exp(-x)) + (1 - t) * std::log1p(std::exp(x));
      EXPECT_NEAR(run.grads[0][i], run.dy[0] * (sigmoid_of(x) - t) / 205,
                  1e-7 * std::abs(run.dy[0]));
    }
    EXPECT_NEAR(run.y[0], sum / 205, 1e-6 * sum / 205);
  }
  check_gradients(case_of(bce_with_logits, {33}));
}

// Where a naive formula gives 0, NaN or infinity.
TEST(BceWithLogits, FarOutItIsRight) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const auto run = [&](float x, float t) {
    const Tensor logits = Tensor::from<float>(memory, {1}, std::vector{x});
    tape.watch(logits);
    const Tensor loss =
        bce_with_logits(tape, logits, Tensor::from<float>(memory, {1}, std::vector{t}));
    tape.backward(loss);
    return Values{loss.item(), tape.grad(logits).item()};
  };
  EXPECT_EQ(run(200, 0), (Values{200, 1}));
  EXPECT_EQ(run(-200, 1), (Values{200, -1}));
  EXPECT_EQ(run(200, 1), (Values{0, 0}));
  const Values near = run(30, 1);
  EXPECT_NEAR(near[0], std::exp(-30.0), 1e-6 * std::exp(-30.0));
  EXPECT_NEAR(near[1], -std::exp(-30.0), 1e-6 * std::exp(-30.0));
}

TEST(KlDivergence, IsTheMeanOverRows) {
  const OpRun run = run_op(case_of(kl_divergence, {5, 41}));
  double sum = 0;
  for (std::size_t i = 0; i < 205; ++i) {
    const double lp = run.leaves[0][i], t = target_of(static_cast<std::int64_t>(i));
    if (t > 0) sum += t * (std::log(t) - lp);
    EXPECT_NEAR(run.grads[0][i], -run.dy[0] * t / 5, 1e-6 * std::abs(run.dy[0]));
  }
  EXPECT_NEAR(run.y[0], sum / 5, 1e-5);
  check_gradients(case_of(kl_divergence, {33}));
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor log_probs = Tensor::from<float>(memory, {1, 2}, std::vector{-1.0f, -INFINITY});
  const Tensor target = Tensor::from<float>(memory, {1, 2}, std::vector{1.0f, 0.0f});
  EXPECT_EQ(kl_divergence(tape, log_probs, target).item(), 1);
}

TEST(Losses, Bf16IsRoundedAFewTimes) {
  for (const Loss loss : {mse, bce_with_logits, kl_divergence}) {
    check_bf16(case_of(loss, {5, 41}), 0x1p-6);
  }
}

TEST(Losses, RefuseWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor a = Tensor::zeros(memory, {2, 3}, DType::kF32, "a");
  const Tensor turned = Tensor::zeros(memory, {3, 2}, DType::kF32);
  const Tensor half = Tensor::zeros(memory, {2, 3}, DType::kBF16);
  const Tensor integers = Tensor::zeros(memory, {2, 3}, DType::kI32);
  for (const Loss loss : {mse, bce_with_logits, kl_divergence}) {
    EXPECT_THROW(loss(tape, a, turned), InvalidArgument);
    EXPECT_THROW(loss(tape, a, half), InvalidArgument);
    EXPECT_THROW(loss(tape, integers, integers), InvalidArgument);
  }
  tape.watch(a);
  const Tensor other = Tensor::zeros(memory, {2, 3}, DType::kF32);
  for (const Loss loss : {bce_with_logits, kl_divergence}) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { loss(tape, other, a); }),
                    {"expected a target that is data", "(a)", "stop_gradient"}));
  }
  EXPECT_THROW(cast(tape, a, DType::kI32), InvalidArgument);
  EXPECT_THROW(cast(tape, integers, DType::kF32), InvalidArgument);
  EXPECT_THROW(stop_gradient(tape, integers), InvalidArgument);
}

TEST(Cast, RoundsOnceAndItsGradientToo) {
  const OpCase round{.inputs = {{5, 41}}, .build = [](Tape& t, const auto& x, auto&) {
                       return cast(t, cast(t, x[0], DType::kBF16), DType::kF32);
                     }};
  const OpRun run = run_op(round);
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    const auto want = engine::BFloat16::from_float(static_cast<float>(run.leaves[0][i]));
    EXPECT_EQ(run.y[i], engine::to_f32(want));
    EXPECT_EQ(run.grads[0][i], run.dy[i]) << "it is one that bf16 holds";
  }
  // Of eighths, each of which bf16 holds, as it does its neighbours.
  OpCase exact = round;
  exact.transform = [](float x) { return std::round(8 * x) / 8; };
  check_gradients(exact, {.eps = 0.125f, .tolerance = 1e-6});
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const Tensor a = Tensor::zeros(memory, {2}, DType::kF32);
  EXPECT_EQ(cast(tape, a, DType::kF32).key(), a.key());
}

TEST(StopGradient, IsDataOfItsOwn) {
  const OpCase op{.inputs = {{33}}, .build = [](Tape& t, const auto& x, auto&) {
                    return mul(t, x[0], stop_gradient(t, x[0]));
                  }};
  const OpRun run = run_op(op);
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    EXPECT_EQ(run.grads[0][i], static_cast<float>(run.dy[i] * run.leaves[0][i])) << "not twice";
  }
  check_bf16(op);
}

}  // namespace
}  // namespace tessera::ops
