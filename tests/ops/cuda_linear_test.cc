// The linear layer on a GPU against the CPU.
#include "ops/linear.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

OpCase linear_case(Shape x, std::int64_t out, WeightLayout layout, bool with_bias) {
  const std::int64_t in = x.dim(-1);
  const Shape w = layout == WeightLayout::kInOut ? Shape{in, out} : Shape{out, in};
  OpCase op{.inputs = {x},
            .parameters = {w},
            .build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
              return linear(tape, leaves[0], p[0], with_bias ? &p[1] : nullptr, layout);
            }};
  if (with_bias) op.parameters.push_back({out});
  return op;
}

// Both sum in f32, in different orders; the largest element is at least the root of the number of
// terms, and the error of a sum grows no faster.
constexpr CudaBounds kBounds{.f32 = 2e-6, .bf16 = 2e-6};

TEST(CudaLinearTest, IsThatOfTheCpu) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    for (const bool with_bias : {false, true}) {
      check_cuda(linear_case({2, 3, 32}, 48, layout, with_bias), kBounds);
      check_cuda(linear_case({31, 33}, 13, layout, with_bias), kBounds);
      check_cuda(linear_case({1, 65}, 1, layout, with_bias), kBounds);
    }
  }
}

// More rows than one block of the column sums takes, and more than its parts.
TEST(CudaLinearTest, ManyRows) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn})
    check_cuda_run(linear_case({1025, 7}, 264, layout, true), {}, kBounds);
  check_cuda_run(linear_case({1025, 8}, 40, WeightLayout::kInOut, true),
                 {.dtype = DType::kBF16, .grad_dtype = DType::kBF16, .num_uses = 2, .offset = 1},
                 kBounds);
  check_cuda_run(linear_case({33000, 1}, 3, WeightLayout::kInOut, true), {}, {.f32 = 2e-5});
}

}  // namespace
}  // namespace tessera::ops
