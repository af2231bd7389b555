#include "ops/parameter.h"

#include "engine/elementwise.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Parameter;
using engine::Tape;
using engine::Tensor;

Tensor parameter(Tape& tape, Parameter& p) {
  const Tensor& value = tape.use(p);
  engine::dispatch_float(value.dtype(), "parameter", [](auto) {});
  const Tensor y = tape.empty(value.shape(), value.dtype(), p.name);
  engine::launch_assign_or_add(tape.stream(), y, value, false, "parameter.forward");
  if (!tape.needs_grad(p)) return y;
  tape.record("parameter", y, [&tape, &p](const Tensor& dy) {
    if (const GradTarget dp = tape.grad_target(p))
      engine::launch_assign_or_add(tape.stream(), dp.dst, dy, dp.accumulate, "parameter.backward");
  });
  return y;
}

}  // namespace tessera::ops
