#include "ops/losses/losses.h"

#include "ops/losses/terms.h"
#include "ops/pointwise.h"
#include "ops/scale.h"
#include "ops/sum.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

namespace {

void check_pair(Tape& tape, const Tensor& x, const Tensor& target, std::string_view op) {
  require_alike(op, x, target);
  engine::require(!tape.needs_grad(target),
                  "[{}] expected a target that is data, got one whose gradient is wanted ({}): "
                  "ops::stop_gradient() makes it data",
                  op, target.name());
}

Tensor divided_sum(Tape& tape, const Tensor& terms, std::int64_t count) {
  return scale(tape, sum(tape, terms), 1.0f / static_cast<float>(count));
}

}  // namespace

Tensor mse(Tape& tape, const Tensor& x, const Tensor& target) {
  require_alike("mse", x, target);
  const bool wants_dx = tape.needs_grad(x), wants_dtarget = tape.needs_grad(target);
  const Tensor terms = tape.empty(x.shape(), x.dtype(), "mse");
  launch_pointwise(tape.stream(), {"mse.forward", 3}, Pointwise<SquareTerm>{{terms}, {x, target}});
  if (wants_dx || wants_dtarget) {
    tape.record("mse", terms, [&tape, x, target](const Tensor& dy) {
      // One after the other: both may be the same tensor.
      if (const GradTarget dx = tape.grad_target(x))
        launch_pointwise(tape.stream(), {"mse.backward", 3},
                         Pointwise<SquareSlope>{dx, {dy, x, target}});
      if (const GradTarget dtarget = tape.grad_target(target))
        launch_pointwise(tape.stream(), {"mse.backward", 3},
                         Pointwise<SquareSlope>{dtarget, {dy, target, x}});
    });
  }
  return divided_sum(tape, terms, x.numel());
}

Tensor bce_with_logits(Tape& tape, const Tensor& logits, const Tensor& target) {
  check_pair(tape, logits, target, "bce_with_logits");
  const bool wants_dx = tape.needs_grad(logits);
  const Tensor terms = tape.empty(logits.shape(), logits.dtype(), "bce_with_logits");
  launch_pointwise(tape.stream(), {"bce_with_logits.forward", kSoftplusFlops + 4},
                   Pointwise<BceTerm>{{terms}, {logits, target}});
  if (wants_dx) {
    tape.record("bce_with_logits", terms, [&tape, logits, target](const Tensor& dy) {
      if (const GradTarget dx = tape.grad_target(logits))
        launch_pointwise(tape.stream(), {"bce_with_logits.backward", 2 * kSigmoidFlops + 5},
                         Pointwise<BceSlope>{dx, {dy, logits, target}});
    });
  }
  return divided_sum(tape, terms, logits.numel());
}

Tensor kl_divergence(Tape& tape, const Tensor& log_probs, const Tensor& target) {
  check_pair(tape, log_probs, target, "kl_divergence");
  const bool wants_dx = tape.needs_grad(log_probs);
  const Tensor terms = tape.empty(log_probs.shape(), log_probs.dtype(), "kl_divergence");
  launch_pointwise(tape.stream(), {"kl_divergence.forward", kLogFlops + 2},
                   Pointwise<KlTerm>{{terms}, {log_probs, target}});
  if (wants_dx) {
    tape.record("kl_divergence", terms,
                [&tape, x = log_probs.without_data(), target](const Tensor& dy) {
                  if (const GradTarget dx = tape.grad_target(x))
                    launch_pointwise(tape.stream(), {"kl_divergence.backward", 1},
                                     Pointwise<KlSlope>{dx, {dy, target}});
                });
  }
  return divided_sum(tape, terms, log_probs.shape().rows());
}

}  // namespace tessera::ops
