#include "ops/swiglu.h"

#include "ops/pointwise.h"
#include "ops/pointwise_functions.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

Tensor swiglu(Tape& tape, const Tensor& gate, const Tensor& up) {
  require_alike("swiglu", gate, up);
  const bool wants_dgate = tape.needs_grad(gate), wants_dup = tape.needs_grad(up);
  const Tensor y = tape.empty(gate.shape(), gate.dtype(), "swiglu");
  launch_pointwise(tape.stream(), {"swiglu.forward", kSigmoidFlops + 2},
                   Pointwise<Gated>{{y}, {gate, up}});
  if (!wants_dgate && !wants_dup) return y;
  const Tensor saved = wants_dgate ? up : up.without_data();
  tape.record("swiglu", y, [&tape, gate, up = saved](const Tensor& dy) {
    // One after the other: gate and up may be the same tensor.
    if (const GradTarget dgate = tape.grad_target(gate)) {
      launch_gradient(tape, {"swiglu.backward_gate", kSigmoidFlops + 6},
                      Pointwise<GateSlope>{dgate, {dy, gate, up}});
    }
    if (const GradTarget dup = tape.grad_target(up)) {
      launch_gradient(tape, {"swiglu.backward_up", kSigmoidFlops + 2},
                      Pointwise<UpSlope>{dup, {dy, gate}});
    }
  });
  return y;
}

}  // namespace tessera::ops
