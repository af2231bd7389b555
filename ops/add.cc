#include "ops/add.h"

#include "ops/pointwise.h"
#include "ops/pointwise_functions.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;

Tensor add(Tape& tape, const Tensor& a, const Tensor& b) {
  require_alike("add", a, b);
  const bool wants_da = tape.needs_grad(a), wants_db = tape.needs_grad(b);
  const Tensor y = tape.empty(a.shape(), a.dtype(), "add");
  launch_pointwise(tape.stream(), {"add.forward", 1}, Pointwise<Sum>{{y}, {a, b}});
  // The gradient of a and of b is that of y itself.
  if (tape.wants_column_sums(a) || tape.wants_column_sums(b)) tape.want_column_sums(y);
  if (!wants_da && !wants_db) return y;
  tape.record("add", y, [&tape, a = a.without_data(), b = b.without_data()](const Tensor& dy) {
    tape.pass_grad(a, dy);
    tape.pass_grad(b, dy);
  });
  return y;
}

}  // namespace tessera::ops
