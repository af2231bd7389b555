#include "ops/group_norm.h"

#include "engine/error.h"
#include "ops/add.h"
#include "ops/dims/broadcast.h"
#include "ops/layernorm.h"
#include "ops/mul.h"
#include "ops/parameter.h"

namespace tessera::ops {

using engine::Parameter;
using engine::Tape;
using engine::Tensor;

Tensor group_norm(Tape& tape, const Tensor& x, std::int64_t num_groups, Parameter& w,
                  Parameter* bias, float eps) {
  const bool has_channels = x.shape().rank() >= 2 && x.numel() > 0;
  engine::require(has_channels && num_groups > 0 && x.dim(1) % num_groups == 0,
                  "[group_norm] expected x (B, C, ...) that is not empty, and C a multiple of {} "
                  "groups, got {} ({})",
                  num_groups, x.shape(), x.name());
  const std::int64_t B = x.dim(0), C = x.dim(1), rest = x.numel() / (B * C);
  for (const Parameter* p : {&w, bias}) {
    if (p == nullptr) continue;
    engine::require(p->shape == engine::Shape{C},
                    "[group_norm] expected parameters ({}), got {} ({})", C, p->shape, p->name);
  }
  // For each channel, as often as it has elements.
  const auto repeated = [&](Parameter& p) {
    return broadcast(tape, parameter(tape, p).reshape({C, 1}), {B, C, rest});
  };
  const Tensor normed =
      layernorm(tape, x.reshape({B * num_groups, x.numel() / (B * num_groups)}), eps);
  Tensor y = mul(tape, normed.reshape({B, C, rest}), repeated(w));
  if (bias != nullptr) y = add(tape, y, repeated(*bias));
  return y.reshape(x.shape());
}

}  // namespace tessera::ops
