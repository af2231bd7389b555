// Rotary embedding on a GPU: values and gradients of the CPU.
#include "ops/rope.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

OpCase rope_case(const Shape& shape, RopeOptions options) {
  return {.inputs = {shape}, .build = [options](Tape& tape, const auto& x, auto&) {
            return rope(tape, x[0], options);
          }};
}

TEST(CudaRope, IsThatOfTheCpu) {
  for (const std::int64_t d : {2, 6, 26, 64, 128}) check_cuda(rope_case({2, 33, 3, d}, {}));
  check_cuda(rope_case({2, 5, 6 * 16}, {.head_size = 16, .num_heads = 4}));
  check_cuda(rope_case({1, 31, 3 * 6}, {.head_size = 6, .num_heads = 2, .base = 500}));
  check_cuda(rope_case({2, 2, 40, 64}, {}));  // more than a block has threads
}

TEST(CudaRope, AnglesStayExactAtFarPositions) {
  check_cuda_run(rope_case({1, 5000, 4}, {}), {}, {.f32 = 1e-6});
}

}  // namespace
}  // namespace tessera::ops
