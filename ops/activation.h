// Functions of one number and their slopes, for the CPU and for CUDA kernels. Private to ops.
#pragma once

#include <cmath>

#include "ops/vector_math.h"

namespace tessera::ops {

/// max(x, 0); NaN stays NaN.
struct Relu {
  static constexpr float value(float x) { return select(x <= 0, 0.0f, x); }
  static constexpr float slope(float x) { return select(x <= 0, 0.0f, 1.0f); }
};

/// x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3). (1 + tanh u) / 2 = sigmoid(2u), which
/// keeps its relative precision where 1 + tanh u cancels.
struct TanhGelu {
  static constexpr float kScale = 2 * 0.797884561f, kCubic = 0.044715f;

  static constexpr float value(float x) {
    const float square = x * x;
    return x * sigmoid(kScale * x * std::fma(kCubic, square, 1.0f));
  }
  /// d/dx x s(2u) = s + x s (1 - s) 2u'.
  static constexpr float slope(float x) {
    const float square = x * x;
    const float s = sigmoid(kScale * x * std::fma(kCubic, square, 1.0f));
    const float du = kScale * std::fma(3 * kCubic, square, 1.0f);
    return std::fma(x * du, s * (1.0f - s), s);
  }
};

/// x P(X <= x), X ~ N(0, 1).
struct ErfGelu {
  static constexpr float value(float x) { return x * normal_cdf(x); }
  static constexpr float slope(float x) { return std::fma(x, normal_density(x), normal_cdf(x)); }
};

/// x sigmoid(x).
struct Silu {
  static constexpr float value(float x) { return x * sigmoid(x); }
  static constexpr float slope(float x) {
    const float s = sigmoid(x);
    return std::fma(x * s, 1.0f - s, s);
  }
};

}  // namespace tessera::ops
