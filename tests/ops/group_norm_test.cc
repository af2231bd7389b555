// Group normalisation against sums written out in double, its gradients, and what it refuses.
#include "ops/group_norm.h"

#include <cmath>

#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

OpCase norm_case(const Shape& x, std::int64_t num_groups, bool with_bias = true) {
  OpCase op{.inputs = {x}, .parameters = {{x.dim(1)}}, .build = [=](Tape& t, auto& in, auto& p) {
              return group_norm(t, in[0], num_groups, p[0], with_bias ? &p[1] : nullptr);
            }};
  if (with_bias) op.parameters.push_back({x.dim(1)});
  return op;
}

TEST(GroupNorm, IsThatOfSumsWrittenOut) {
  const Shape shape{2, 6, 3, 5};
  for (const std::int64_t num_groups : {1, 3, 6}) {
    const OpRun run = run_op(norm_case(shape, num_groups));
    const std::size_t size = 6 / static_cast<std::size_t>(num_groups) * 15;  // of a group
    Values y;
    for (std::size_t begin = 0; begin < run.y.size(); begin += size) {
      double mean = 0, var = 0;
      for (std::size_t i = begin; i < begin + size; ++i)
        mean += run.leaves[0][i] / static_cast<double>(size);
      for (std::size_t i = begin; i < begin + size; ++i)
        var += std::pow(run.leaves[0][i] - mean, 2) / static_cast<double>(size);
      for (std::size_t i = begin; i < begin + size; ++i) {
        const std::size_t c = i / 15 % 6;
        y.push_back((run.leaves[0][i] - mean) / std::sqrt(var + 1e-5) * run.leaves[1][c] +
                    run.leaves[2][c]);
      }
    }
    expect_close(run.y, y, 5e-6, "y of " + std::to_string(num_groups));
  }
}

TEST(GroupNorm, GradientsMatchDifferences) {
  check_gradients(norm_case({2, 4, 3}, 2));
  check_gradients(norm_case({3, 4}, 2, /*with_bias=*/false));
  check_bf16(norm_case({2, 4, 3, 2}, 2), 0x1p-5);
}

TEST(GroupNorm, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Parameter w{"w", {6}, engine::Init::ones()}, other{"other", {5}, engine::Init::ones()};
  for (Parameter* p : {&w, &other}) p->value = Tensor::zeros(memory, p->shape, DType::kF32);
  const Tensor x = Tensor::zeros(memory, {2, 6, 3}, DType::kF32);
  EXPECT_THROW(group_norm(tape, x, 4, w, nullptr), engine::InvalidArgument);
  EXPECT_THROW(group_norm(tape, x, 0, w, nullptr), engine::InvalidArgument);
  EXPECT_THROW(group_norm(tape, x.reshape({36}), 1, w, nullptr), engine::InvalidArgument);
  EXPECT_THROW(group_norm(tape, x, 2, other, nullptr), engine::InvalidArgument);
  EXPECT_THROW(group_norm(tape, x, 2, w, &other), engine::InvalidArgument);
  EXPECT_THROW(group_norm(tape, Tensor::zeros(memory, {2, 6}, DType::kBF16), 2, w, nullptr),
               engine::InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops
