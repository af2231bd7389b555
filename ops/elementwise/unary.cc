#include "ops/elementwise/unary.h"

#include "ops/activation.h"
#include "ops/elementwise/functions.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor tanh(Tape& tape, const Tensor& x) {
  return unary<Tanh>(tape, x, "tanh", {"tanh.forward", kTanhFlops},
                     {"tanh.backward", kExpFlops + 6});
}

Tensor sigmoid(Tape& tape, const Tensor& x) {
  return unary<Sigmoid>(tape, x, "sigmoid", {"sigmoid.forward", kSigmoidFlops},
                        {"sigmoid.backward", kExpFlops + 5});
}

Tensor silu(Tape& tape, const Tensor& x) {
  return unary<Silu>(tape, x, "silu", {"silu.forward", kSigmoidFlops + 1},
                     {"silu.backward", kSigmoidFlops + 5});
}

Tensor exp(Tape& tape, const Tensor& x) {
  return unary<Exp>(tape, x, "exp", {"exp.forward", kExpFlops}, {"exp.backward", kExpFlops + 1});
}

Tensor log(Tape& tape, const Tensor& x) {
  return unary<Log>(tape, x, "log", {"log.forward", kLogFlops}, {"log.backward", 2});
}

Tensor softplus(Tape& tape, const Tensor& x) {
  return unary<Softplus>(tape, x, "softplus", {"softplus.forward", kSoftplusFlops},
                         {"softplus.backward", kSigmoidFlops + 1});
}

Tensor clamp(Tape& tape, const Tensor& x, float low, float high) {
  engine::require(low <= high, "[clamp] expected low <= high, got {} and {} ({})", low, high,
                  x.name());
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(x.shape(), x.dtype(), "clamp");
  launch_pointwise(tape.stream(), {"clamp.forward", 2}, Pointwise<Clamped>{{y}, {x}, {low, high}});
  if (!wants_dx) return y;
  tape.record("clamp", y, [&tape, x, low, high](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x))
      launch_pointwise(tape.stream(), {"clamp.backward", 2},
                       Pointwise<ClampSlope>{dx, {dy, x}, {low, high}});
  });
  return y;
}

}  // namespace tessera::ops
