#include "engine/cuda_launch.cuh"
#include "ops/activation.h"
#include "ops/pointwise_cuda.h"
#include "ops/vector_access.cuh"

namespace tessera::ops {

using engine::GradTarget;
using engine::Stream;
using engine::Tensor;

namespace {

// What an output element is, given the input elements at its index.

template <class F>
struct Value {
  static constexpr int kNumInputs = 1;
  static __device__ float of(const float (&x)[1]) { return F::value(x[0]); }
};

template <class F>
struct Slope {  // dy, x
  static constexpr int kNumInputs = 2;
  static __device__ float of(const float (&x)[2]) { return x[0] * F::slope(x[1]); }
};

struct Sum {
  static constexpr int kNumInputs = 2;
  static __device__ float of(const float (&x)[2]) { return x[0] + x[1]; }
};

struct Gated {  // gate, up
  static constexpr int kNumInputs = 2;
  static __device__ float of(const float (&x)[2]) { return Silu::value(x[0]) * x[1]; }
};

struct GateSlope {  // dy, gate, up
  static constexpr int kNumInputs = 3;
  static __device__ float of(const float (&x)[3]) { return x[0] * x[2] * Silu::slope(x[1]); }
};

struct UpSlope {  // dy, gate
  static constexpr int kNumInputs = 2;
  static __device__ float of(const float (&x)[2]) { return x[0] * Silu::value(x[1]); }
};

template <class T, int kNumInputs>
struct Inputs {
  const T* data[kNumInputs];
};

// Elements [i, i + kWidth).
template <class F, int kWidth, bool kAligned, class T>
__device__ void write_elements(T* out, bool accumulate, const Inputs<T, F::kNumInputs>& inputs,
                               std::int64_t i) {
  float in[F::kNumInputs][kWidth], result[kWidth];
#pragma unroll
  for (int n = 0; n < F::kNumInputs; ++n) read_vector<kWidth, kAligned>(in[n], inputs.data[n] + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    float x[F::kNumInputs];
#pragma unroll
    for (int n = 0; n < F::kNumInputs; ++n) x[n] = in[n][k];
    result[k] = F::of(x);
  }
  write_vector<kWidth, kAligned>(out + i, result, accumulate);
}

template <class F, bool kAligned, class T>
__global__ void elementwise_kernel(T* out, bool accumulate, Inputs<T, F::kNumInputs> inputs,
                                   std::int64_t numel) {
  constexpr int kWidth = kVectorWidth<T>;
  for (std::int64_t i = engine::stride_begin() * kWidth; i < numel;
       i += engine::stride_step() * kWidth) {
    if (i + kWidth <= numel) {
      write_elements<F, kWidth, kAligned>(out, accumulate, inputs, i);
    } else {
      for (std::int64_t j = i; j < numel; ++j)
        write_elements<F, 1, false>(out, accumulate, inputs, j);
    }
  }
}

// out = or += F of the inputs.
template <class F, class... In>
void launch(const Stream& stream, const GradTarget& out, const In&... in) {
  engine::dispatch_float(out.dst.dtype(), "pointwise", [&](auto t) {
    using T = decltype(t);
    constexpr int kWidth = kVectorWidth<T>;
    T* data = out.dst.data<T>();
    const auto kernel = are_aligned<kWidth>(data, in.template data<T>()...)
                            ? elementwise_kernel<F, true, T>
                            : elementwise_kernel<F, false, T>;
    const std::int64_t numel = out.dst.numel();
    engine::launch_kernel(stream, engine::stride_shape((numel + kWidth - 1) / kWidth), kernel, data,
                          out.accumulate, Inputs<T, F::kNumInputs>{{in.template data<T>()...}},
                          numel);
  });
}

}  // namespace

template <class F>
void unary_forward_cuda(const Stream& stream, const Tensor& y, const Tensor& x) {
  launch<Value<F>>(stream, {y}, x);
}

template <class F>
void unary_backward_cuda(const Stream& stream, const GradTarget& dx, const Tensor& dy,
                         const Tensor& x) {
  launch<Slope<F>>(stream, dx, dy, x);
}

template void unary_forward_cuda<Relu>(const Stream&, const Tensor&, const Tensor&);
template void unary_forward_cuda<TanhGelu>(const Stream&, const Tensor&, const Tensor&);
template void unary_forward_cuda<ErfGelu>(const Stream&, const Tensor&, const Tensor&);
template void unary_backward_cuda<Relu>(const Stream&, const GradTarget&, const Tensor&,
                                        const Tensor&);
template void unary_backward_cuda<TanhGelu>(const Stream&, const GradTarget&, const Tensor&,
                                            const Tensor&);
template void unary_backward_cuda<ErfGelu>(const Stream&, const GradTarget&, const Tensor&,
                                           const Tensor&);

void add_cuda(const Stream& stream, const Tensor& y, const Tensor& a, const Tensor& b) {
  launch<Sum>(stream, {y}, a, b);
}

void swiglu_forward_cuda(const Stream& stream, const Tensor& y, const Tensor& gate,
                         const Tensor& up) {
  launch<Gated>(stream, {y}, gate, up);
}

void swiglu_backward_gate_cuda(const Stream& stream, const GradTarget& dgate, const Tensor& dy,
                               const Tensor& gate, const Tensor& up) {
  launch<GateSlope>(stream, dgate, dy, gate, up);
}

void swiglu_backward_up_cuda(const Stream& stream, const GradTarget& dup, const Tensor& dy,
                             const Tensor& gate) {
  launch<UpSlope>(stream, dup, dy, gate);
}

}  // namespace tessera::ops
