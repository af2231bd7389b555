// What nvcc compiles: one line for each function that squared_relu.cc launches.
#include "squared_relu.h"

#include "ops/pointwise.cuh"

namespace ops = tessera::ops;
using tessera::engine::Stream;

template void ops::pointwise_cuda(const Stream&, const ops::Pointwise<ops::ValueOf<SquaredRelu>>&);
template void ops::pointwise_cuda(const Stream&, const ops::Pointwise<ops::SlopeOf<SquaredRelu>>&);
