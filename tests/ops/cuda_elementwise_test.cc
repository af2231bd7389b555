// Functions of one number, sub, div and where on a GPU: values and gradients of the CPU.
#include <cmath>

#include "ops/elementwise/div.h"
#include "ops/elementwise/sub.h"
#include "ops/elementwise/unary.h"
#include "ops/elementwise/where.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

const std::int64_t kSizes[] = {1, 8, 33, 257};
const CudaBounds kSameBits{.f32 = 0, .bf16 = 0};

OpCase unary_case(const std::function<Tensor(Tape&, const Tensor&)>& op, std::int64_t numel) {
  return {.inputs = {{numel}},
          .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0]); },
          .scale = 2};
}

OpCase binary_case(Tensor (*op)(Tape&, const Tensor&, const Tensor&), std::int64_t numel) {
  return {.inputs = {{numel}, {numel}},
          .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0], x[1]); },
          .transform = [](float v) { return v < 0 ? v - 0.5f : v + 0.5f; }};
}

TEST(CudaElementwise, FunctionsAreThoseOfTheCpu) {
  for (const auto op : {tanh, sigmoid, silu, exp, softplus})
    for (const std::int64_t numel : kSizes) check_cuda(unary_case(op, numel));
  for (const std::int64_t numel : kSizes) {
    OpCase op = unary_case(log, numel);
    op.transform = [](float v) { return std::abs(v) + 0.25f; };
    check_cuda(op);
  }
}

TEST(CudaElementwise, SpecialValues) {
  for (const auto op : {tanh, sigmoid, softplus, exp, log}) {
    OpCase nan = unary_case(op, 33);
    nan.transform = [](float) { return NAN; };
    for (const double y : run_op(nan, {.on_cuda = true}).y) EXPECT_TRUE(std::isnan(y));
    OpCase far = unary_case(op, 33);
    far.transform = [](float v) { return v < 0 ? -60.0f : 60.0f; };
    const OpRun want = run_op(far), got = run_op(far, {.on_cuda = true});
    for (std::size_t i = 0; i < want.y.size(); ++i) {
      if (std::isnan(want.y[i])) {
        EXPECT_TRUE(std::isnan(got.y[i]));
      } else {
        EXPECT_NEAR(got.y[i], want.y[i], 2e-5 * std::abs(want.y[i]));
      }
    }
  }
}

TEST(CudaElementwise, ClampSubDivAndWhereHaveTheBitsOfTheCpu) {
  const auto unit = [](Tape& t, const Tensor& x) { return clamp(t, x, -1, 0.5f); };
  for (const std::int64_t numel : kSizes) {
    check_cuda(unary_case(unit, numel), kSameBits);
    check_cuda(binary_case(sub, numel), kSameBits);
    check_cuda(binary_case(div, numel));
    check_cuda({.inputs = {{numel}, {numel}, {numel}},
                .build = [](Tape& t, const auto& x,
                            auto&) { return where(t, clamp(t, x[0], 0, 9), x[1], x[2]); }},
               kSameBits);
  }
}

}  // namespace
}  // namespace tessera::ops
