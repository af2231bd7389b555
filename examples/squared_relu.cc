#include "squared_relu.h"

#include "ops/pointwise.h"

using tessera::engine::Tape;
using tessera::engine::Tensor;

// Names for traces, and floating point operations of an element.
Tensor squared_relu(Tape& tape, const Tensor& x) {
  return tessera::ops::unary<SquaredRelu>(tape, x, "squared_relu", {"squared_relu.forward", 2},
                                          {"squared_relu.backward", 3});
}
