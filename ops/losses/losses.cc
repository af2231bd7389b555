#include "ops/losses/losses.h"

#include "ops/elementwise/sub.h"
#include "ops/losses/terms.h"
#include "ops/mul.h"
#include "ops/pointwise.h"
#include "ops/scale.h"
#include "ops/sum.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

namespace {

void check_pair(Tape& tape, const Tensor& x, const Tensor& target, std::string_view op) {
  engine::require(x.shape() == target.shape() && x.dtype() == target.dtype(),
                  "[{}] expected a target {} {} as {}, got {} {} ({})", op, name_of(x.dtype()),
                  x.shape(), x.name(), name_of(target.dtype()), target.shape(), target.name());
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
  const Tensor difference = sub(tape, x, target);
  return divided_sum(tape, mul(tape, difference, difference), x.numel());
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
