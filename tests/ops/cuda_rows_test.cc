// Softmax, losses of rows, gathers and batched products on a GPU: the values and gradients of the
// CPU, any size and alignment.
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "ops/add.h"
#include "ops/bmm.h"
#include "ops/dropout.h"
#include "ops/index/gather.h"
#include "ops/softmax/softmax.h"
#include "tests/ops/dot_product_cases.h"
#include "tests/ops/naive_cross_entropy.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;
const CudaBounds kSameBits{.f32 = 0, .bf16 = 0};

// Makes gradients whose sums depend on their order: those of the harness have so few bits that
// their sums are exact.
Tensor scaled(Tape& tape, const Tensor& y) { return dropout(tape, y, 0.1f, {1, 2}, 0); }

// Exponentials differ in the last bits.
constexpr CudaBounds kExpBounds{.f32 = 3e-6, .bf16 = 3e-6};

using Op = Tensor (*)(Tape&, const Tensor&);

OpCase softmax_case(Op op, Shape shape, float scale = 2) {
  return {.inputs = {shape},
          .build = [op](Tape& tape, const auto& x, auto&) { return scaled(tape, op(tape, x[0])); },
          .scale = scale};
}

TEST(CudaSoftmax, IsThatOfTheCpu) {
  for (const Op op : {softmax, log_softmax}) {
    for (const Shape& shape : {Shape{1}, Shape{33}, Shape{9, 31}, Shape{2, 3, 65}, Shape{5, 1}})
      check_cuda(softmax_case(op, shape), kExpBounds);
    for (const DType dtype : {kF32, kBF16})
      check_cuda_run(softmax_case(op, {2, 5003}), {.dtype = dtype}, kExpBounds);
  }
}

// One element of each row has all of its probability, so that no exponential rounds.
TEST(CudaSoftmax, SumsInTheOrderOfTheCpu) {
  for (const std::int64_t cols : {31, 65, 1100}) {
    const OpCase op{.inputs = {{3, cols}}, .build = [=](Tape& tape, const auto& x, auto&) {
                      std::vector<float> shift(static_cast<std::size_t>(3 * cols), 0.0f);
                      for (std::size_t r = 0; r < 3; ++r)
                        shift[r * static_cast<std::size_t>(cols) + r] = 1000;
                      const Tensor mask = to_tensor(tape.memory(), {3, cols}, shift, x[0].dtype());
                      return scaled(tape, log_softmax(tape, add(tape, x[0], mask)));
                    }};
    check_cuda(op, kSameBits);
  }
}

TEST(CudaSoftmax, WhatIsNotANumberStaysInItsRow) {
  const std::vector<float> special = {NAN, kInfinity, -kInfinity};
  for (const Op op : {softmax, log_softmax}) {
    for (const float value : special) {
      const OpCase one{
          .inputs = {{3, 70}}, .build = [=](Tape& tape, const auto& x, auto&) {
            std::vector<float> shift(3 * 70, 0.0f);
            for (std::size_t c = 0; c < 70; ++c) {
              if (c == 40 || value == -kInfinity) shift[70 + c] = value;
            }
            return op(tape,
                      add(tape, x[0], to_tensor(tape.memory(), {3, 70}, shift, x[0].dtype())));
          }};
      for (const DType dtype : {kF32, kBF16}) {
        const OpRun run = run_op(one, {.dtype = dtype, .on_cuda = true});
        for (std::size_t i = 0; i < run.y.size(); ++i) {
          EXPECT_EQ(std::isnan(run.y[i]), i / 70 == 1) << i;
          EXPECT_EQ(std::isnan(run.grads[0][i]), i / 70 == 1) << i;
        }
      }
    }
  }
}

TEST(CudaCrossEntropyRows, IsThatOfTheCpu) {
  for (const auto& [n, vocab_size] : {std::pair{37, 307}, {33, 304}, {1, 7}, {2, 1}, {31, 8}})
    check_cuda(cross_entropy_rows_case(some_targets(n, vocab_size), vocab_size), kExpBounds);
  check_cuda_run(cross_entropy_rows_case(some_targets(4, 9001), 9001), {}, kExpBounds);
}

// A target outside the vocabulary, and one to ignore.
TEST(CudaCrossEntropyRows, ABadTargetMakesItsRowNaN) {
  for (const std::int32_t bad : {31, -1, std::numeric_limits<std::int32_t>::max()}) {
    const OpRun run = run_op(cross_entropy_rows_case({3, bad, 30, kIgnore}, 31), {.on_cuda = true});
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(run.y[i]), i == 1) << bad;
    EXPECT_EQ(run.y[3], 0);
    for (std::size_t i = 0; i < run.grads[0].size(); ++i) {
      EXPECT_EQ(std::isnan(run.grads[0][i]), i / 31 == 1) << bad << ", element " << i;
      if (i / 31 == 3) {
        EXPECT_EQ(run.grads[0][i], 0);
      }
    }
  }
}

using Numbers = std::vector<std::int32_t>;

// `count` numbers below `end`, those of small i several times.
Numbers some_numbers(std::int64_t count, std::int64_t end) {
  Numbers numbers;
  for (std::int64_t i = 0; i < count; ++i)
    numbers.push_back(static_cast<std::int32_t>(i % 3 == 0 ? i % 2 : i * 7919 % end));
  return numbers;
}

Tensor to_index(const Memory& memory, const Shape& shape, const Numbers& values) {
  return Tensor::from<std::int32_t>(memory, shape, values, "index");
}

OpCase gather_case(Shape shape) {
  return {.inputs = {shape}, .build = [=](Tape& tape, const auto& x, auto&) {
            return gather(tape, x[0],
                          to_index(tape.memory(), shape.drop_last(),
                                   some_numbers(shape.rows(), shape.dim(-1))));
          }};
}

OpCase rows_case(std::int64_t num_rows, std::int64_t width, const Numbers& numbers) {
  return {.inputs = {{num_rows, width}}, .build = [=](Tape& tape, const auto& x, auto&) {
            const Shape shape{static_cast<std::int64_t>(numbers.size())};
            return scaled(tape, rows(tape, x[0], to_index(tape.memory(), shape, numbers)));
          }};
}

// More rows than the emulated device has threads.
TEST(CudaGather, HasTheBitsOfTheCpu) {
  for (const Shape& shape : {Shape{1, 1}, Shape{7}, Shape{2, 3, 33}, Shape{300, 5}})
    check_cuda(gather_case(shape), kSameBits);
}

TEST(CudaGather, RowsHaveTheBitsOfTheCpu) {
  for (const std::int64_t width : {1, 33, 64})
    check_cuda(rows_case(37, width, some_numbers(100, 37)), kSameBits);
  check_cuda(rows_case(7, 5, Numbers(1025, 6)), kSameBits);
}

// Whatever lies before and after the row.
TEST(CudaGather, AnIndexOutsideIsNaNAndHasNoGradient) {
  const OpCase elements{.inputs = {{4, 3}}, .build = [](Tape& tape, const auto& x, auto&) {
                          return gather(tape, x[0], to_index(tape.memory(), {4}, {2, 3, -1, 0}));
                        }};
  for (const int num_uses : {1, 2}) {
    const OpRun run = run_op(elements, {.num_uses = num_uses, .on_cuda = true});
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(std::isnan(run.y[r]), r == 1 || r == 2) << r;
      for (std::size_t c = 0; c < 3; ++c) {
        const bool chosen = (r == 0 && c == 2) || (r == 3 && c == 0);
        EXPECT_EQ(run.grads[0][r * 3 + c] != 0, chosen) << r << ", " << c;
      }
    }
  }
  const OpCase of_rows{.inputs = {{3, 5}}, .build = [](Tape& tape, const auto& x, auto&) {
                         return rows(tape, x[0], to_index(tape.memory(), {4}, {2, 3, -1, 2}));
                       }};
  const OpRun run = run_op(of_rows, {.on_cuda = true});
  for (std::size_t i = 0; i < run.y.size(); ++i)
    EXPECT_EQ(std::isnan(run.y[i]), i >= 5 && i < 15) << i;
  for (std::size_t i = 0; i < 15; ++i)
    EXPECT_EQ(run.grads[0][i], i < 10 ? 0 : static_cast<float>(run.dy[i - 10] + run.dy[i + 5]))
        << i;
}

// Both sum in f32, in different orders. In bf16 a GPU may round a product before another gradient
// is added.
constexpr CudaBounds kProductBounds{.f32 = 2e-6, .bf16 = 0x1p-8};

TEST(CudaBmm, IsThatOfTheCpu) {
  for (const BmmOptions& options : {BmmOptions{}, {true, false}, {false, true}, {true, true}}) {
    for (const auto& [batch, m, n, k] :
         {std::tuple{3, 16, 24, 8}, {2, 9, 13, 17}, {2, 1, 13, 33}}) {
      SCOPED_TRACE(fmt::format("{} x ({}, {}, {}), {} {}", batch, m, n, k, options.transpose_a,
                               options.transpose_b));
      const Shape a = options.transpose_a ? Shape{batch, k, m} : Shape{batch, m, k};
      const Shape b = options.transpose_b ? Shape{batch, n, k} : Shape{batch, k, n};
      check_cuda({.inputs = {a, b},
                  .build = [=](Tape& tape, const auto& x,
                               auto&) { return bmm(tape, x[0], x[1], options); }},
                 kProductBounds);
    }
  }
}

TEST(CudaBmm, OfNothingIsZeroOrNothing) {
  const auto y = [](std::int64_t batch, std::int64_t inner) {
    return run_op({.inputs = {{batch, 3, inner}, {batch, inner, 2}},
                   .build = [](Tape& tape, const auto& x, auto&) { return bmm(tape, x[0], x[1]); }},
                  {.on_cuda = true})
        .y;
  };
  EXPECT_EQ(y(2, 0), Values(12, 0));
  EXPECT_EQ(y(0, 4), Values());
}

// With fewer queries than keys, whose heads they share; then with each kind of mask and of scale.
TEST(CudaDotProductAttention, IsThatOfTheCpu) {
  const CudaBounds bounds{.f32 = 3e-6, .bf16 = 0x1p-6};
  const AttentionSizes sizes{.B = 2, .T = 5, .S = 9, .H = 4, .KV = 2, .D = 8, .E = 8};
  const Mask causal = [](Tape& tape, DType dtype) { return causal_mask(tape, 5, 9, dtype); };
  check_cuda(dot_product_case(sizes), bounds);
  check_cuda(dot_product_case(sizes, 0, causal), bounds);
  for (const MaskedCase& m : masked_cases()) {
    SCOPED_TRACE(m.name);
    for (const float scale : {0.0f, 0.3f})
      check_cuda(dot_product_case(m.sizes, scale, m.mask), bounds);
  }
}

}  // namespace
}  // namespace tessera::ops
