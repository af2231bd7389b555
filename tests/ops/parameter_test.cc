// A parameter as a tensor: its value and gradient, with several uses, and after the parameter's own
// memory has gone.
#include "ops/parameter.h"

#include <cstddef>
#include <cstdint>

#include "ops/add.h"
#include "ops/dims/broadcast.h"
#include "ops/dims/slice.h"
#include "ops/mul.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

// x w + b with w and b for each channel.
OpCase scaled_case() {
  return {.inputs = {{4, 5}},
          .parameters = {{5}, {5}},
          .build = [](Tape& tape, const auto& x, auto& p) {
            const auto repeated = [&](Parameter& of) {
              return broadcast(tape, parameter(tape, of), x[0].shape());
            };
            return add(tape, mul(tape, x[0], repeated(p[0])), repeated(p[1]));
          }};
}

TEST(ParameterTest, ScalesAndShifts) {
  const OpRun run = run_op(scaled_case());
  const Values &x = run.leaves[0], &w = run.leaves[1], &b = run.leaves[2];
  Values y(20), dx(20), dw(5, 0), db(5, 0);
  for (std::size_t i = 0; i < 20; ++i) {
    y[i] = x[i] * w[i % 5] + b[i % 5];
    dx[i] = run.dy[i] * w[i % 5];
    dw[i % 5] += run.dy[i] * x[i];
    db[i % 5] += run.dy[i];
  }
  expect_close(run.y, y, 1e-6, "y");
  expect_close(run.grads[0], dx, 1e-6, "dx");
  expect_close(run.grads[1], dw, 1e-6, "dw");
  expect_close(run.grads[2], db, 1e-6, "db");
}

TEST(ParameterTest, GradientsMatchDifferences) {
  check_gradients(scaled_case());
  check_bf16(scaled_case(), 0x1p-6);
  check_gradients({.inputs = {}, .parameters = {{3, 2}}, .build = [](Tape& tape, auto&, auto& p) {
                     // Used twice, and by ops that keep it.
                     return mul(tape, parameter(tape, p[0]), parameter(tape, p[0]));
                   }});
}

// As docs/ops.md has it.
TEST(ParameterTest, IsATokenOfTheClassAndLearnedPositions) {
  constexpr std::int64_t B = 2, T = 3, C = 4;
  const OpCase op{.inputs = {{B, T, C}},
                  .parameters = {{C}, {T + 1, C}},
                  .build = [](Tape& tape, const auto& patches, auto& p) {
                    const Tensor tokens = broadcast(tape, parameter(tape, p[0]), {B, 1, C});
                    const Tensor x = concat(tape, {tokens, patches[0]}, 1);
                    return add(tape, x, broadcast(tape, parameter(tape, p[1]), x.shape()));
                  }};
  const OpRun run = run_op(op);
  Values y, dtoken(C, 0), dpositions((T + 1) * C, 0);
  for (std::size_t i = 0; i < run.y.size(); ++i) {
    const std::size_t b = i / ((T + 1) * C), t = i / C % (T + 1), c = i % C;
    const double x = t == 0 ? run.leaves[1][c] : run.leaves[0][(b * T + t - 1) * C + c];
    y.push_back(x + run.leaves[2][t * C + c]);
    if (t == 0) dtoken[c] += run.dy[i];
    dpositions[t * C + c] += run.dy[i];
  }
  expect_close(run.y, y, 1e-6, "y");
  expect_close(run.grads[1], dtoken, 1e-6, "dtoken");
  expect_close(run.grads[2], dpositions, 1e-6, "dpositions");
  check_gradients(op);
}

TEST(ParameterTest, IsACopy) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Parameter p{"p", {2}, engine::Init::zeros()};
  p.value = to_tensor(memory, {2}, {1, 2}, DType::kF32);
  const Tensor x = parameter(tape, p);
  engine::fill_zero(p.value);
  EXPECT_EQ(to_values(x), (Values{1, 2}));
}

TEST(ParameterTest, RefusesWhatHasNoGradient) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Parameter p{"p", {2}, engine::Init::zeros()};
  EXPECT_THROW(parameter(tape, p), engine::InvalidArgument);
  p.value = Tensor::zeros(memory, {2}, DType::kI32);
  EXPECT_THROW(parameter(tape, p), engine::InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops
