#include "ops/scale.h"

#include "ops/pointwise.h"
#include "ops/pointwise_functions.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor scale(Tape& tape, const Tensor& x, float factor) {
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(x.shape(), x.dtype(), "scale");
  launch_pointwise(tape.stream(), {"scale.forward", 1}, Pointwise<Scaled>{{y}, {x}, {factor}});
  if (!wants_dx) return y;
  tape.record("scale", y, [&tape, x = x.without_data(), factor](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x))
      launch_pointwise(tape.stream(), {"scale.backward", 1}, Pointwise<Scaled>{dx, {dy}, {factor}});
  });
  return y;
}

}  // namespace tessera::ops
