#include "ops/gelu.h"

#include "ops/activation.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;

Tensor gelu(Tape& tape, const Tensor& x, GeluKind kind) {
  if (kind == GeluKind::kTanh) {
    return unary<TanhGelu>(tape, x, "gelu", {"gelu.forward", kSigmoidFlops + 6},
                           {"gelu.backward", kSigmoidFlops + 14});
  }
  return unary<ErfGelu>(tape, x, "gelu", {"gelu.forward", kNormalCdfFlops + 1},
                        {"gelu.backward", kNormalCdfFlops + kExpFlops + 6});
}

}  // namespace tessera::ops
