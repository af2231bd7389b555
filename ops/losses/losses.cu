#include "ops/losses/terms.h"
#include "ops/pointwise.cuh"

namespace tessera::ops {

using engine::Stream;

template void pointwise_cuda(const Stream&, const Pointwise<SquareTerm>&);
template void pointwise_cuda(const Stream&, const Pointwise<SquareSlope>&);
template void pointwise_cuda(const Stream&, const Pointwise<BceTerm>&);
template void pointwise_cuda(const Stream&, const Pointwise<BceSlope>&);
template void pointwise_cuda(const Stream&, const Pointwise<KlTerm>&);
template void pointwise_cuda(const Stream&, const Pointwise<KlSlope>&);

}  // namespace tessera::ops
