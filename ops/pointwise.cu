#include "ops/pointwise.cuh"

#include "ops/activation.h"
#include "ops/gelu_parts.h"
#include "ops/pointwise_functions.h"

namespace tessera::ops {

using engine::Stream;

template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<Relu>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<Relu>>&);
template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<TanhGelu>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<TanhGelu>>&);
template void pointwise_cuda(const Stream&, const Pointwise<ValueOf<ErfGelu>>&);
template void pointwise_cuda(const Stream&, const Pointwise<SlopeOf<ErfGelu>>&);

template void pointwise_cuda(const Stream&, const Pointwise<Scaled>&);
template void pointwise_cuda(const Stream&, const Pointwise<Sum>&);
template void pointwise_cuda(const Stream&, const Pointwise<Product>&);
template void pointwise_cuda(const Stream&, const Pointwise<Gated>&);
template void pointwise_cuda(const Stream&, const Pointwise<GateSlope>&);
template void pointwise_cuda(const Stream&, const Pointwise<UpSlope>&);

void tanh_gelu_cuda(const Stream& stream, engine::DType dtype, void* y, const void* x,
                    std::int64_t numel) {
  engine::dispatch_float(dtype, "gelu", [&](auto t) {
    using T = decltype(t);
    internal::launch_elements<ValueOf<TanhGelu>>(stream, static_cast<T*>(y), false, {},
                                                 {{static_cast<const T*>(x)}}, numel);
  });
}

}  // namespace tessera::ops
