// Rotary embedding on a GPU: values and gradients of the CPU.
#include "ops/rope.h"

#include <cstdint>
#include <span>
#include <vector>

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
  const RopeScaling llama3{.factor = 8, .original_positions = 64}, linear{.factor = 3};
  for (const RopeScaling& scaling : {llama3, linear}) {
    check_cuda(rope_case({2, 33, 2, 16}, {.base = 500, .scaling = scaling}));
  }
}

TEST(CudaRope, GivenPositionsAreThoseOfTheCpu) {
  for (const bool of_each : {false, true}) {
    check_cuda({.inputs = {{2, 5, 16}}, .build = [of_each](Tape& tape, const auto& x, auto&) {
                  const std::vector<std::int32_t> all = {0, 1, 2, 0, 1, -7, 700, 701, 5, 1 << 20};
                  const std::span<const std::int32_t> values(all.data(), of_each ? 10 : 5);
                  const Shape shape = of_each ? Shape{2, 5} : Shape{5};
                  const Tensor at = Tensor::from<std::int32_t>(tape.memory(), shape, values);
                  return rope(tape, x[0], {.head_size = 8, .positions = at});
                }});
  }
}

TEST(CudaRope, AnglesStayExactAtFarPositions) {
  check_cuda_run(rope_case({1, 5000, 4}, {}), {}, {.f32 = 1e-6});
}

}  // namespace
}  // namespace tessera::ops
