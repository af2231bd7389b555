#include "ops/relu.h"

#include "ops/activation.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;

Tensor relu(Tape& tape, const Tensor& x) {
  return unary<Relu>(tape, x, "relu", {"relu.forward", 1}, {"relu.backward", 2});
}

}  // namespace tessera::ops
