#include "ops/elementwise/cast.h"

#include "engine/elementwise.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor cast(Tape& tape, const Tensor& x, DType dtype) {
  for (const DType either : {x.dtype(), dtype}) engine::dispatch_float(either, "cast", [](auto) {});
  if (x.dtype() == dtype) return x;
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(x.shape(), dtype, "cast");
  engine::launch_assign_or_add(tape.stream(), y, x, false, "cast.forward");
  if (!wants_dx) return y;
  tape.record("cast", y, [&tape, x = x.without_data()](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x))
      engine::launch_assign_or_add(tape.stream(), dx.dst, dy, dx.accumulate, "cast.backward");
  });
  return y;
}

Tensor stop_gradient(Tape& tape, const Tensor& x) {
  engine::dispatch_float(x.dtype(), "stop_gradient", [](auto) {});
  const Tensor y = tape.empty(x.shape(), x.dtype(), "stop_gradient");
  engine::launch_assign_or_add(tape.stream(), y, x, false, "stop_gradient");
  return y;
}

}  // namespace tessera::ops
