#include "ops/gelu.h"

#include "ops/activation.h"
#include "ops/gelu_parts.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;

namespace {

constexpr PointwiseWork kTanhBackward{"gelu.backward", kTanhGeluSlopeFlops};

}  // namespace

Tensor gelu(Tape& tape, const Tensor& x, GeluKind kind) {
  if (kind == GeluKind::kTanh)
    return unary<TanhGelu>(tape, x, "gelu", {"gelu.forward", kTanhGeluFlops}, kTanhBackward);
  return unary<ErfGelu>(tape, x, "gelu", {"gelu.forward", kNormalCdfFlops + 1},
                        {"gelu.backward", kNormalCdfFlops + kExpFlops + 6});
}

void record_tanh_gelu(Tape& tape, const Tensor& h, const Tensor& y) {
  if (tape.needs_grad(h)) record_unary<TanhGelu>(tape, h, y, "gelu", kTanhBackward);
}

}  // namespace tessera::ops
