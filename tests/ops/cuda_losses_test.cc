// Losses of two tensors and of weighted classes, casts, and values without their gradient, on a
// GPU: values and gradients of the CPU.
#include <cmath>

#include "ops/elementwise/cast.h"
#include "ops/elementwise/unary.h"
#include "ops/losses/losses.h"
#include "ops/losses/weighted_cross_entropy.h"
#include "ops/mul.h"
#include "tests/ops/naive_cross_entropy.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

TEST(CudaLosses, AreThoseOfTheCpu) {
  for (const std::int64_t rows : {1, 33}) {
    for (const auto loss : {bce_with_logits, kl_divergence}) {
      check_cuda({.inputs = {{rows, 7}, {rows, 7}}, .build = [loss](Tape& t, const auto& x, auto&) {
                    return loss(t, x[0], stop_gradient(t, sigmoid(t, x[1])));
                  }});
    }
    check_cuda({.inputs = {{rows, 7}, {rows, 7}},
                .build = [](Tape& t, const auto& x, auto&) { return mse(t, x[0], x[1]); }});
  }
}

TEST(CudaWeightedCrossEntropy, IsThatOfTheCpu) {
  for (const auto& [rows, num_classes] : {std::pair{37, 307}, {1025, 10}, {1, 7}})
    check_cuda(weighted_case(some_targets(rows, num_classes), num_classes),
               {.f32 = 3e-6, .bf16 = 3e-6});
  const OpRun none = run_op(weighted_case(Targets(5, kIgnore), 31), {.on_cuda = true});
  EXPECT_EQ(none.y, Values{0});
  EXPECT_EQ(max_abs(none.grads[0]), 0);
}

// A kernel cannot throw.
TEST(CudaWeightedCrossEntropy, BadTargetsMakeTheLossNaN) {
  for (const std::int32_t bad : {31, -1}) {
    const OpRun run = run_op(weighted_case({3, bad, 30, kIgnore}, 31), {.on_cuda = true});
    EXPECT_TRUE(std::isnan(run.y[0])) << bad;
  }
}

TEST(CudaStopGradient, HasTheBitsOfTheCpu) {
  check_cuda(
      {.inputs = {{5, 41}},
       .build = [](Tape& t, const auto& x, auto&) { return mul(t, x[0], stop_gradient(t, x[0])); }},
      {.f32 = 0, .bf16 = 0});
}

TEST(CudaCast, HasTheBitsOfTheCpu) {
  check_cuda({.inputs = {{5, 41}},
              .build = [](Tape& t, const auto& x,
                          auto&) { return cast(t, cast(t, x[0], DType::kBF16), DType::kF32); }},
             {.f32 = 0, .bf16 = 0});
}

}  // namespace
}  // namespace tessera::ops
