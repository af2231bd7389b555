#include "ops/elementwise/where.h"

#include "ops/elementwise/functions.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor where(Tape& tape, const Tensor& condition, const Tensor& a, const Tensor& b) {
  require_alike("where", a, condition);
  require_alike("where", a, b);
  const bool wants_da = tape.needs_grad(a), wants_db = tape.needs_grad(b);
  const Tensor y = tape.empty(a.shape(), a.dtype(), "where");
  launch_pointwise(tape.stream(), {"where.forward", 0}, Pointwise<Chosen>{{y}, {condition, a, b}});
  if (!wants_da && !wants_db) return y;
  tape.record("where", y,
              [&tape, condition, a = a.without_data(), b = b.without_data()](const Tensor& dy) {
                for (const Tensor* x : {&a, &b}) {
                  if (const GradTarget dx = tape.grad_target(*x))
                    launch_pointwise(tape.stream(), {"where.backward", 0},
                                     Pointwise<ChosenSlope>{dx, {dy, condition}, {x == &a}});
                }
              });
  return y;
}

}  // namespace tessera::ops
