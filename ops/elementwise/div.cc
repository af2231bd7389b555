#include "ops/elementwise/div.h"

#include "ops/elementwise/functions.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor div(Tape& tape, const Tensor& a, const Tensor& b) {
  require_alike("div", a, b);
  const bool wants_da = tape.needs_grad(a), wants_db = tape.needs_grad(b);
  const Tensor y = tape.empty(a.shape(), a.dtype(), "div");
  launch_pointwise(tape.stream(), {"div.forward", 1}, Pointwise<Quotient>{{y}, {a, b}});
  if (!wants_da && !wants_db) return y;
  tape.record("div", y, [&tape, a = wants_db ? a : a.without_data(), b](const Tensor& dy) {
    // One after the other: a and b may be the same tensor.
    if (const GradTarget da = tape.grad_target(a))
      launch_pointwise(tape.stream(), {"div.backward", 1}, Pointwise<Quotient>{da, {dy, b}});
    if (const GradTarget db = tape.grad_target(b))
      launch_pointwise(tape.stream(), {"div.backward", 4},
                       Pointwise<QuotientSlope>{db, {dy, a, b}});
  });
  return y;
}

}  // namespace tessera::ops
