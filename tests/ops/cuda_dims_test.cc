// Slices, concatenations, permutations, broadcasts and reductions on a GPU: the bits of the CPU.
#include "ops/dims/broadcast.h"
#include "ops/dims/permute.h"
#include "ops/dims/reduce.h"
#include "ops/dims/slice.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

const CudaBounds kSameBits{.f32 = 0, .bf16 = 0};

void check(Shape shape, const std::function<Tensor(Tape&, const Tensor&)>& op) {
  check_cuda({.inputs = {shape},
              .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0]); }},
             kSameBits);
}

TEST(CudaDims, PartsAndTheirOrderHaveTheBitsOfTheCpu) {
  for (const int dim : {0, 1, 2}) {
    check({4, 6, 5}, [dim](Tape& t, const Tensor& x) { return slice(t, x, dim, 1, 3); });
    check({4, 4, 4}, [dim](Tape& t, const Tensor& x) {
      const std::vector<Tensor> parts = split(t, x, dim, {1, 2, 1});
      return concat(t, {parts[2], parts[0], parts[2]}, dim);
    });
  }
  check({3, 4, 5, 7}, [](Tape& t, const Tensor& x) { return permute(t, x, {2, 0, 3, 1}); });
  check({200, 7}, [](Tape& t, const Tensor& x) { return transpose(t, x, 0, 1); });
}

TEST(CudaDims, BroadcastsHaveTheBitsOfTheCpu) {
  for (const Shape& x : {Shape{}, Shape{6}, Shape{5, 1}, Shape{3, 1, 6}, Shape{3, 5, 6}})
    check(x, [](Tape& t, const Tensor& v) { return broadcast(t, v, {3, 5, 6}); });
}

TEST(CudaDims, ReductionsHaveTheBitsOfTheCpu) {
  for (const std::int64_t n : {1, 31, 32, 100}) {
    for (const std::int64_t inner : {1, 3, 33}) {
      const Shape shape{2, n, inner};
      check(shape, [](Tape& t, const Tensor& x) { return sum(t, x, 1); });
      check(shape, [](Tape& t, const Tensor& x) { return mean(t, x, 1); });
      check(shape, [](Tape& t, const Tensor& x) { return max(t, x, 1).y; });
    }
  }
  check({70, 5}, [](Tape& t, const Tensor& x) { return sum(t, x, 1); });  // more than a block's
  // Ties and NaN.
  OpCase op{.inputs = {{40, 2}},
            .build = [](Tape& t, const auto& x, auto&) { return max(t, x[0], 0).y; }};
  op.transform = [](float v) { return v < 0 ? 0.0f : 1.0f; };
  check_cuda(op, kSameBits);
  op.transform = [](float v) { return v < 1 ? v : NAN; };
  const OpRun want = run_op(op), got = run_op(op, {.on_cuda = true});
  for (std::size_t i = 0; i < want.y.size(); ++i)
    EXPECT_EQ(std::isnan(got.y[i]), std::isnan(want.y[i]));
  EXPECT_EQ(got.grads, want.grads);
}

}  // namespace
}  // namespace tessera::ops
