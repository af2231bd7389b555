// Elements and rows chosen by number: values, gradients in the order of numbers with one rounding,
// and numbers that are refused.
#include "ops/index/gather.h"

#include "tests/testing/errors.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Stream;

using Numbers = std::vector<std::int32_t>;

Tensor to_index(const Memory& memory, const Shape& shape, const Numbers& values) {
  return Tensor::from<std::int32_t>(memory, shape, values, "index");
}

// Of 2 x 3 rows of 5, both ends included.
const Numbers kChosen = {0, 4, 2, 2, 1, 4};

OpCase gather_case() {
  return {.inputs = {{2, 3, 5}}, .build = [](Tape& tape, const auto& x, auto&) {
            return gather(tape, x[0], to_index(tape.memory(), {2, 3}, kChosen));
          }};
}

// 3 rows of 4 numbers out of 11, most of them repeated.
const Numbers kNumbers = {3, 0, 10, 3, 3, 7, 0, 3, 1, 10, 3, 3};

OpCase rows_case() {
  return {.inputs = {{11, 5}}, .build = [](Tape& tape, const auto& x, auto&) {
            return rows(tape, x[0], to_index(tape.memory(), {3, 4}, kNumbers));
          }};
}

TEST(Gather, TakesAnElementOfEachRow) {
  const OpRun run = run_op(gather_case());
  Values dx(30, 0);
  ASSERT_EQ(run.y.size(), 6u);
  for (std::size_t r = 0; r < 6; ++r) {
    const std::size_t at = r * 5 + static_cast<std::size_t>(kChosen[r]);
    EXPECT_EQ(run.y[r], run.leaves[0][at]);
    dx[at] = run.dy[r];
  }
  EXPECT_EQ(run.grads[0], dx);
}

TEST(Gather, AddsToAGradientThatIsThere) {
  const OpRun one = run_op(gather_case()), two = run_op(gather_case(), {.num_uses = 2});
  for (std::size_t i = 0; i < 30; ++i)
    EXPECT_EQ(two.grads[0][i] == 0, one.grads[0][i] == 0) << i << ", where nothing is chosen";
  check_gradients(gather_case());
  check_bf16(gather_case());
}

// A vector is one row.
TEST(Gather, OfAVectorIsANumber) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = to_tensor(memory, {3}, {5, 6, 7}, DType::kF32);
  EXPECT_EQ(gather(tape, x, to_index(memory, {}, {2})).item(), 7);
}

TEST(Rows, AreCopiedAndTheirGradientsAddedInOrder) {
  const OpRun run = run_op(rows_case());
  std::vector<float> dx(11 * 5, 0.0f);
  for (std::size_t i = 0; i < kNumbers.size(); ++i) {
    for (std::size_t c = 0; c < 5; ++c) {
      const std::size_t at = static_cast<std::size_t>(kNumbers[i]) * 5 + c;
      ASSERT_EQ(run.y[i * 5 + c], run.leaves[0][at]);
      dx[at] += static_cast<float>(run.dy[i * 5 + c]);
    }
  }
  EXPECT_EQ(run.grads[0], Values(dx.begin(), dx.end()));  // rows that are not chosen are zero
}

TEST(Rows, GradientsWhenSharedOrOfData) {
  check_gradients(rows_case());
  check_bf16(rows_case());
}

// The gradient of row 1 of (3, 1), which is chosen once for each element of `dy`.
double summed_gradient(const std::vector<float>& dy, DType dtype) {
  const Memory memory({.poison = true});
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = to_tensor(memory, {3, 1}, {1, 2, 3}, dtype);
  tape.watch(x);
  const auto count = static_cast<std::int64_t>(dy.size());
  const Tensor y = rows(tape, x, to_index(memory, {count}, Numbers(dy.size(), 1)));
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("loss", loss, [&](const Tensor&) {
    tape.pass_grad(y, to_tensor(memory, {count, 1}, dy, dtype));
  });
  tape.backward(loss);
  return to_values(tape.grad(x))[1];
}

TEST(Rows, AreAddedInOrderAndRoundedOnce) {
  EXPECT_EQ(summed_gradient({0x1p30f, 1, -0x1p30f, 1}, DType::kF32), 1);
  EXPECT_EQ(summed_gradient({1, 0x1p30f, 1, -0x1p30f}, DType::kF32), 0);
  // Rounded at each addition it would stay 1: each addend is half a unit.
  std::vector<float> dy(65, 0x1p-8f);
  dy[0] = 1;
  EXPECT_EQ(summed_gradient(dy, DType::kBF16), 1.25);
}

// gather(): 6 numbers and elements; what is assigned is written as a whole. rows(): 12 rows of 5
// out of 11.
TEST(Gather, StatesItsWork) {
  LastWorks works;
  run_op(gather_case(), {.listener = &works});
  works.expect("gather.forward", 0, 24 + 24, 24);
  works.expect("gather.backward", 0, 24 + 24, 120);
  run_op(gather_case(), {.num_uses = 2, .listener = &works});
  works.expect("gather.backward", 6, 24 + 24 + 24, 24);
  run_op(rows_case(), {.listener = &works});
  works.expect("rows.forward", 0, 48 + 240, 240);
  works.expect("rows.backward", 60, 240, 220);
  run_op(rows_case(), {.num_uses = 2, .listener = &works});
  works.expect("rows.backward", 60, 240 + 240, 240);
}

TEST(Gather, RefusedNumbersAreNamed) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = Tensor::zeros(memory, {3, 5}, DType::kF32);
  for (const std::int32_t number : {-1, 5}) {
    EXPECT_EQ(
        error_of<InvalidArgument>([&] {
          gather(tape, x, to_index(memory, {3}, {0, 4, number}));
        }),
        fmt::format("[gather] expected an index in [0, 5), got {} at position 2 (index)", number));
  }
  for (const std::int32_t number : {-1, 3}) {
    EXPECT_EQ(
        error_of<InvalidArgument>([&] {
          rows(tape, x, to_index(memory, {2}, {2, number}));
        }),
        fmt::format("[rows] expected an index in [0, 3), got {} at position 1 (index)", number));
  }
}

TEST(Gather, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = Tensor::zeros(memory, {3, 5}, DType::kF32, "x");
  const Tensor integers = Tensor::zeros(memory, {3, 5}, DType::kI32, "integers");
  const Tensor three = to_index(memory, {3}, {0, 1, 2});
  const auto error = [&](auto op, const Tensor& of, const Tensor& index) {
    return error_of<InvalidArgument>([&] { op(tape, of, index); });
  };
  EXPECT_TRUE(has(error(gather, x, to_index(memory, {2}, {0, 1})),
                  {"[gather]", "each row of (3, 5)", "got (2)"}));
  EXPECT_TRUE(has(error(gather, x, to_index(memory, {1, 3}, {0, 1, 2})), {"got (1, 3)"}));
  EXPECT_TRUE(has(error(gather, Tensor::zeros(memory, {}, DType::kF32), three), {"of ()"}));
  EXPECT_TRUE(has(error(gather, integers, three), {"[gather]", "f32 or bf16", "integers"}));
  EXPECT_TRUE(has(error(gather, x, Tensor::zeros(memory, {3}, DType::kF32, "i")),
                  {"[gather]", "index i32", "got f32 (i)"}));
  EXPECT_TRUE(has(error(rows, x.reshape({15}), three), {"[rows]", "(N, C)", "(15)"}));
  EXPECT_TRUE(has(error(rows, integers, three), {"[rows]", "f32 or bf16"}));
  EXPECT_TRUE(has(error(rows, x, Tensor::zeros(memory, {3}, DType::kF32)),
                  {"[rows]", "index i32", "got f32"}));
  EXPECT_EQ(rows(tape, x, Tensor::zeros(memory, {0}, DType::kI32)).shape(), (Shape{0, 5}));
}

}  // namespace
}  // namespace tessera::ops
