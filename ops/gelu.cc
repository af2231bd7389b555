#include "ops/gelu.h"

#include "ops/activation.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;

Tensor gelu(Tape& tape, const Tensor& x, GeluKind kind) {
  const PointwiseWork tanh_work{"gelu", "gelu.forward", "gelu.backward", kSigmoidFlops + 6,
                                kSigmoidFlops + 14};
  const PointwiseWork erf_work{"gelu", "gelu.forward", "gelu.backward", kNormalCdfFlops + 1,
                               kNormalCdfFlops + kExpFlops + 6};
  return kind == GeluKind::kTanh ? unary<TanhGelu>(tape, x, tanh_work)
                                 : unary<ErfGelu>(tape, x, erf_work);
}

}  // namespace tessera::ops
