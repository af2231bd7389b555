#include "ops/gelu.h"

#include "ops/pointwise.h"
#include "ops/vector_math.h"

namespace tessera::ops {

using engine::Tape;
using engine::Tensor;

namespace {

// (1 + tanh u) / 2 = sigmoid(2u), which keeps its relative precision where 1 + tanh u cancels.
constexpr float kScale = 2 * 0.797884561f, kCubic = 0.044715f;

float tanh_gelu(float x) {
  const float square = x * x;
  return x * sigmoid(kScale * x * std::fma(kCubic, square, 1.0f));
}

// d/dx x s(2u) = s + x s (1 - s) 2u'.
float tanh_gelu_slope(float x) {
  const float square = x * x;
  const float s = sigmoid(kScale * x * std::fma(kCubic, square, 1.0f));
  const float slope = kScale * std::fma(3 * kCubic, square, 1.0f);
  return std::fma(x * slope, s * (1.0f - s), s);
}

float erf_gelu(float x) { return x * normal_cdf(x); }

float erf_gelu_slope(float x) { return std::fma(x, normal_density(x), normal_cdf(x)); }

}  // namespace

Tensor gelu(Tape& tape, const Tensor& x, GeluKind kind) {
  const PointwiseWork tanh_work{"gelu", "gelu.forward", "gelu.backward", kSigmoidFlops + 6,
                                kSigmoidFlops + 14};
  const PointwiseWork erf_work{"gelu", "gelu.forward", "gelu.backward", kNormalCdfFlops + 1,
                               kNormalCdfFlops + kExpFlops + 6};
  return kind == GeluKind::kTanh ? unary(
                                       tape, x, tanh_work, [](float v) { return tanh_gelu(v); },
                                       [](float v) { return tanh_gelu_slope(v); })
                                 : unary(
                                       tape, x, erf_work, [](float v) { return erf_gelu(v); },
                                       [](float v) { return erf_gelu_slope(v); });
}

}  // namespace tessera::ops
