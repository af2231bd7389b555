#include "ops/relu.h"

#include "ops/pointwise.h"
#include "ops/vector_math.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;

Tensor relu(Tape& tape, const Tensor& x) {
  return unary(
      tape, x, {"relu", "relu.forward", "relu.backward", 1, 2},
      [](float v) { return select(v <= 0, 0.0f, v); },
      [](float v) { return select(v <= 0, 0.0f, 1.0f); });
}

}  // namespace tessera::ops
