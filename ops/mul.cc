#include "ops/mul.h"

#include "ops/pointwise.h"
#include "ops/pointwise_functions.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor mul(Tape& tape, const Tensor& a, const Tensor& b) {
  require_alike("mul", a, b);
  const bool wants_da = tape.needs_grad(a), wants_db = tape.needs_grad(b);
  const Tensor y = tape.empty(a.shape(), a.dtype(), "mul");
  launch_pointwise(tape.stream(), {"mul.forward", 1}, Pointwise<Product>{{y}, {a, b}});
  if (!wants_da && !wants_db) return y;
  const Tensor saved_a = wants_db ? a : a.without_data(), saved_b = wants_da ? b : b.without_data();
  tape.record("mul", y, [&tape, a = saved_a, b = saved_b](const Tensor& dy) {
    // One after the other: a and b may be the same tensor.
    for (const auto& [x, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      if (const GradTarget dx = tape.grad_target(*x))
        launch_pointwise(tape.stream(), {"mul.backward", 1}, Pointwise<Product>{dx, {dy, *other}});
    }
  });
  return y;
}

}  // namespace tessera::ops
