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

void finish_tanh_gelu_slope_cuda(const Stream& stream, const engine::DeviceMatrix& c,
                                 const engine::GeluSlope& slope, bool is_sloped) {
  auto* const sums = static_cast<float*>(slope.column_sums.data);
  if (is_sloped) {
    if (sums != nullptr) part_sums_cuda(stream, sums, c.dtype, c.data, c.rows, c.cols);
    return;
  }
  engine::dispatch_float(c.dtype, "gelu", [&](auto t) {
    using T = decltype(t);
    using F = SlopeOf<TanhGelu>;
    T* const dx = static_cast<T*>(c.data);
    const internal::PointwiseInputs<T, 2> inputs{{dx, static_cast<const T*>(slope.at.data)}};
    if (sums == nullptr)
      return internal::launch_elements<F>(stream, dx, false, {}, inputs, c.rows * c.cols);
    internal::launch_elements_and_sums<F>(stream, dx, false, {}, inputs, sums, c.rows, c.cols);
  });
}

}  // namespace tessera::ops
