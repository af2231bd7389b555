#include "ops/elementwise/sub.h"

#include "ops/elementwise/functions.h"
#include "ops/pointwise.h"
#include "ops/pointwise_functions.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor sub(Tape& tape, const Tensor& a, const Tensor& b) {
  require_alike("sub", a, b);
  const bool wants_da = tape.needs_grad(a), wants_db = tape.needs_grad(b);
  const Tensor y = tape.empty(a.shape(), a.dtype(), "sub");
  launch_pointwise(tape.stream(), {"sub.forward", 1}, Pointwise<Difference>{{y}, {a, b}});
  if (!wants_da && !wants_db) return y;
  tape.record("sub", y, [&tape, a = a.without_data(), b = b.without_data()](const Tensor& dy) {
    if (const GradTarget db = tape.grad_target(b))
      launch_pointwise(tape.stream(), {"sub.backward", 1}, Pointwise<Scaled>{db, {dy}, {-1}});
    tape.pass_grad(a, dy);
  });
  return y;
}

}  // namespace tessera::ops
