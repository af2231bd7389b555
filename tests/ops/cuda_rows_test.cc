// Ops of rows on a GPU: the values and gradients of the CPU, any size and alignment.
#include <cmath>
#include <limits>

#include "ops/add.h"
#include "ops/dropout.h"
#include "ops/softmax/softmax.h"
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
constexpr CudaBounds kSoftmaxBounds{.f32 = 3e-6, .bf16 = 3e-6};

using Op = Tensor (*)(Tape&, const Tensor&);

OpCase softmax_case(Op op, Shape shape, float scale = 2) {
  return {.inputs = {shape},
          .build = [op](Tape& tape, const auto& x, auto&) { return scaled(tape, op(tape, x[0])); },
          .scale = scale};
}

TEST(CudaSoftmax, IsThatOfTheCpu) {
  for (const Op op : {softmax, log_softmax}) {
    for (const Shape& shape : {Shape{1}, Shape{33}, Shape{9, 31}, Shape{2, 3, 65}, Shape{5, 1}})
      check_cuda(softmax_case(op, shape), kSoftmaxBounds);
    for (const DType dtype : {kF32, kBF16})
      check_cuda_run(softmax_case(op, {2, 5003}), {.dtype = dtype}, kSoftmaxBounds);
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

}  // namespace
}  // namespace tessera::ops
