// Rotary embedding: angles and pairing against double precision, which heads turn, the gradient,
// and the reason it exists: products depend on distance only.
#include "ops/rope.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::Stream;

OpCase rope_case(const Shape& shape, RopeOptions options) {
  return {.inputs = {shape}, .build = [options](Tape& tape, const auto& x, auto&) {
            return rope(tape, x[0], options);
          }};
}

// The heads of `d` of one token, of which the first `rotated` are turned to `position`.
Values naive_turn(const Values& x, double position, std::int64_t d, std::int64_t rotated,
                  double base) {
  Values y = x;
  for (std::int64_t h = 0; h < rotated; ++h) {
    for (std::int64_t i = 0; i < d / 2; ++i) {
      const double angle =
          position * std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(d));
      const auto a = static_cast<std::size_t>(h * d + i);
      const std::size_t b = a + static_cast<std::size_t>(d / 2);
      y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
      y[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
    }
  }
  return y;
}

// Tokens of `heads` heads of `d` each, each turned to direction * position(its row).
Values naive_rotation(const Values& x, const std::function<double(std::int64_t row)>& position,
                      std::int64_t heads, std::int64_t d, std::int64_t rotated, double base,
                      double direction) {
  Values y;
  const std::int64_t width = heads * d;
  for (std::int64_t begin = 0; begin < std::ssize(x); begin += width) {
    const Values token(x.begin() + begin, x.begin() + begin + width);
    const double at = direction * position(begin / width);
    const Values turned = naive_turn(token, at, d, rotated, base);
    y.insert(y.end(), turned.begin(), turned.end());
  }
  return y;
}

// naive_rotation() at positions 0 to tokens - 1 in each sample.
Values naive_rotation(const Values& x, std::int64_t tokens, std::int64_t heads, std::int64_t d,
                      std::int64_t rotated, double base, double direction) {
  const auto in_turn = [=](std::int64_t row) { return static_cast<double>(row % tokens); };
  return naive_rotation(x, in_turn, heads, d, rotated, base, direction);
}

TEST(RopeTest, RotatesByPositionInTheHalfSplitPairing) {
  for (const std::int64_t d : {2, 6, 64}) {
    const OpRun run = run_op(rope_case({2, 33, 3, d}, {.base = 500}));
    expect_close(run.y, naive_rotation(run.leaves[0], 33, 3, d, 3, 500, 1), 1e-6, "y");
    expect_close(run.grads[0], naive_rotation(run.dy, 33, 3, d, 3, 500, -1), 1e-6, "dx");
  }
}

TEST(RopeTest, RotatesTheFirstHeadsOfAPackedProjectionAndCopiesTheRest) {
  const OpRun run = run_op(rope_case({2, 5, 6 * 8}, {.head_size = 8, .num_heads = 4}));
  expect_close(run.y, naive_rotation(run.leaves[0], 5, 6, 8, 4, 10000, 1), 1e-6, "y");
  expect_close(run.grads[0], naive_rotation(run.dy, 5, 6, 8, 4, 10000, -1), 1e-6, "dx");
  for (std::size_t row = 0; row < 10; ++row) {
    for (std::size_t i = row * 48 + 32; i < row * 48 + 48; ++i)
      ASSERT_EQ(run.y[i], run.leaves[0][i]) << i;
  }
}

TEST(RopeTest, AnglesStayExactAtFarPositions) {
  constexpr std::int64_t kTokens = 20000;
  const OpRun run = run_op(rope_case({1, kTokens, 4}, {}));
  expect_close(run.y, naive_rotation(run.leaves[0], kTokens, 1, 4, 1, 10000, 1), 1e-7, "y");
}

// A pair turns by its own angle, of which its first element is the cosine where x is 1 and 0.
Values angles_at_one(std::int64_t d, const RopeScaling& scaling) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  std::vector<float> x(std::size_t(2 * d), 0);
  for (std::size_t i = 0; i < std::size_t(d / 2); ++i) x[std::size_t(d) + i] = 1;
  const Tensor y =
      rope(tape, Tensor::from<float>(memory, {1, 2, d}, x), {.base = 500000, .scaling = scaling});
  Values angles;
  for (std::int64_t i = 0; i < d / 2; ++i) {
    const float* row = y.data<float>() + d;
    angles.push_back(std::atan2(double{row[d / 2 + i]}, double{row[i]}));
  }
  return angles;
}

// Of Llama 3.2 1B (D 64): 15 pairs keep their angle, 14 turn 32 times slower; the three in between
// are inv_freq of transformers.
TEST(RopeTest, ScalesTheSlowPairsAlone) {
  const Values own = angles_at_one(64, {});
  const Values linear = angles_at_one(64, {.factor = 4});
  const Values llama3 = angles_at_one(64, {.factor = 32, .original_positions = 8192});
  for (std::size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(linear[i], own[i] / 4, 1e-6 * own[i]) << i;
    if (i >= 15 && i < 18) continue;
    EXPECT_NEAR(llama3[i], i < 15 ? own[i] : own[i] / 32, 1e-6 * own[i]) << i;
  }
  const Values between = {0.0012905480107292533, 0.000429556705057621, 9.708286233944818e-05};
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(llama3[15 + i], between[i], 1e-6 * between[i]);
  EXPECT_EQ(angles_at_one(64, {.factor = 1, .original_positions = 8192}), own);
}

TEST(RopeTest, RotatesByGivenPositions) {
  const Memory memory;
  // Two documents in the first row, a sample that goes on in the second; and positions of both.
  const std::vector<std::int32_t> each = {0, 1, 2, 0, 1, 700, 701, 702, 703, 704};
  const std::vector<std::int32_t> all = {-3, 0, 5, 5, 1 << 30};
  for (const auto& positions : {each, all}) {
    const auto n = static_cast<std::int64_t>(positions.size());
    const Shape shape = n == 10 ? Shape{2, 5} : Shape{5};
    const Tensor at = Tensor::from<std::int32_t>(memory, shape, positions);
    const OpCase op{.inputs = {{2, 5, 3 * 4}}, .build = [at](Tape& tape, const auto& x, auto&) {
                      return rope(tape, x[0],
                                  {.head_size = 4, .num_heads = 2, .base = 500, .positions = at});
                    }};
    const OpRun run = run_op(op);
    const auto position = [&](std::int64_t row) { return double(positions[std::size_t(row % n)]); };
    expect_close(run.y, naive_rotation(run.leaves[0], position, 3, 4, 2, 500, 1), 1e-6, "y");
    expect_close(run.grads[0], naive_rotation(run.dy, position, 3, 4, 2, 500, -1), 1e-6, "dx");
    check_gradients(op);
    check_bf16(op);
  }
}

TEST(RopeTest, PositionsInTurnAreTheOnesThatItTakesItself) {
  const Memory memory;
  std::vector<std::int32_t> positions(66);  // of two samples
  for (std::size_t t = 0; t < positions.size(); ++t) {
    positions[t] = static_cast<std::int32_t>(t % 33);
  }
  const OpRun own = run_op(rope_case({2, 33, 8}, {}));
  for (const Shape& shape : {Shape{33}, Shape{2, 33}}) {
    const std::span<const std::int32_t> of_shape(positions.data(), std::size_t(shape.numel()));
    const Tensor at = Tensor::from<std::int32_t>(memory, shape, of_shape);
    const OpRun given =
        run_op({.inputs = {{2, 33, 8}}, .build = [at](Tape& t, const auto& x, auto&) {
                  return rope(t, x[0], {.positions = at});
                }});
    EXPECT_EQ(given.y, own.y);
    EXPECT_EQ(given.grads, own.grads);
  }
}

TEST(RopeTest, ProductsDependOnDistanceOnly) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  // Equal vectors at every position.
  constexpr std::int64_t kTokens = 40, kSize = 16;
  std::vector<float> q, k;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const auto one = random_values(kSize, 1), other = random_values(kSize, 2);
    q.insert(q.end(), one.begin(), one.end());
    k.insert(k.end(), other.begin(), other.end());
  }
  const Values rq = to_values(rope(tape, to_tensor(memory, {1, kTokens, kSize}, q, DType::kF32)));
  const Values rk = to_values(rope(tape, to_tensor(memory, {1, kTokens, kSize}, k, DType::kF32)));
  const auto product = [&](std::size_t t, std::size_t s) {
    double sum = 0;
    for (std::size_t i = 0; i < kSize; ++i) sum += rq[t * kSize + i] * rk[s * kSize + i];
    return sum;
  };
  for (std::size_t t = 5; t < kTokens; ++t) EXPECT_NEAR(product(t, t - 5), product(5, 0), 2e-5);
  EXPECT_GT(std::abs(product(6, 0) - product(5, 0)), 1e-2);
}

TEST(RopeTest, GradientsMatchDifferences) {
  check_gradients(rope_case({2, 5, 3 * 6}, {.head_size = 6, .num_heads = 2}));
  check_bf16(rope_case({2, 5, 3, 6}, {.num_heads = 2}));
}

TEST(RopeTest, RefusesWhatItCannotPair) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = Tensor::zeros(memory, {1, 2, 18}, DType::kF32);
  EXPECT_THROW(rope(tape, x, {.head_size = 9}), engine::InvalidArgument);
  EXPECT_THROW(rope(tape, x, {.head_size = 4}), engine::InvalidArgument);
  EXPECT_THROW(rope(tape, x, {.head_size = 6, .num_heads = 4}), engine::InvalidArgument);
  EXPECT_THROW(rope(tape, x.reshape({1, 2, 9, 2}), {.head_size = 6}), engine::InvalidArgument);
  EXPECT_THROW(rope(tape, x.reshape({2, 18})), engine::InvalidArgument);
  EXPECT_THROW(rope(tape, Tensor::zeros(memory, {1, 2, 18}, DType::kI32)), engine::InvalidArgument);
  const Tensor y = Tensor::zeros(memory, {2, 3, 18}, DType::kF32);
  for (const Shape& other : {Shape{2}, Shape{6}, Shape{3, 2}, Shape{2, 3, 1}}) {
    const Tensor positions = Tensor::zeros(memory, other, DType::kI32);
    EXPECT_THROW(rope(tape, y, {.positions = positions}), engine::InvalidArgument);
  }
  EXPECT_THROW(rope(tape, y, {.positions = Tensor::zeros(memory, {3}, DType::kF32)}),
               engine::InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops
