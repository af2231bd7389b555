#include "ops/activation.h"
#include "ops/elementwise/functions.h"
#include "ops/pointwise.cuh"

namespace tessera::ops {

using engine::Stream;

template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<Tanh>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<Tanh>>&);
template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<Sigmoid>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<Sigmoid>>&);
template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<Silu>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<Silu>>&);
template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<Exp>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<Exp>>&);
template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<Log>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<Log>>&);
template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<Softplus>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<Softplus>>&);
template void pointwise_cuda(const Stream&, const Pointwise<Clamped>&);
template void pointwise_cuda(const Stream&, const Pointwise<ClampSlope>&);
template void pointwise_cuda(const Stream&, const Pointwise<Difference>&);
template void pointwise_cuda(const Stream&, const Pointwise<Quotient>&);
template void pointwise_cuda(const Stream&, const Pointwise<QuotientSlope>&);
template void pointwise_cuda(const Stream&, const Pointwise<Chosen>&);
template void pointwise_cuda(const Stream&, const Pointwise<ChosenSlope>&);

}  // namespace tessera::ops
