// Losses of two tensors, and casts, on a GPU: values and gradients of the CPU.
#include "ops/elementwise/cast.h"
#include "ops/elementwise/unary.h"
#include "ops/losses/losses.h"
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

TEST(CudaCast, HasTheBitsOfTheCpu) {
  check_cuda({.inputs = {{5, 41}},
              .build = [](Tape& t, const auto& x,
                          auto&) { return cast(t, cast(t, x[0], DType::kBF16), DType::kF32); }},
             {.f32 = 0, .bf16 = 0});
}

}  // namespace
}  // namespace tessera::ops
