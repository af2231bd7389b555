// What an element is of the ops here, on the CPU and in CUDA kernels, and its slope: as
// ops/vector_math.h and ops/pointwise.h ask for. Errors are those of the CPU: where exp is called,
// a GPU adds those of its approximation, which ops/vector_math.h states. Private to ops.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/vector_math.h"

namespace tessera::ops {

/// Operations that the functions below count as in Work::flops.
inline constexpr double kTanhFlops = kExpFlops + 18, kLogFlops = 27,
                        kSoftplusFlops = kExpFlops + kLogFlops + 6;

/// tanh(x) within 2 ulp, of the sign of x. Near 0 it is x + x^3 p(x^2) with a minimax polynomial p;
/// elsewhere 1 - 2 / (e^2|x| + 1).
constexpr float tanh(float x) {
  const float square = x * x, t = std::fabs(x);
  float p = 0.00214753533f;
  p = std::fma(p, square, -0.00818267185f);
  p = std::fma(p, square, 0.0217029657f);
  p = std::fma(p, square, -0.0539472029f);
  p = std::fma(p, square, 0.133332103f);
  p = std::fma(p, square, -0.333333313f);
  const float near = std::fma(x * square, p, x);
  const float far = 1.0f - 2.0f / (exp(2.0f * t) + 1.0f);
  return std::copysign(select(t < 0.625f, near, far), x);  // of 0, too
}

/// The natural logarithm within 1 ulp; -infinity at 0, NaN below. x = 2^n m with m in
/// [sqrt(1/2), sqrt(2)), and log(1 + f) = f - f^2 / 2 + f^3 p(f) with a minimax polynomial p.
constexpr float log(float x) {
  constexpr float kLn2High = 0x1.62e400p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kSmallest = std::numeric_limits<float>::min();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool is_subnormal = x < kSmallest;
  const auto bits = std::bit_cast<std::uint32_t>(x * select(is_subnormal, 0x1p23f, 1.0f));
  // Rounds down, and sqrt(1/2) is the border.
  const std::int32_t exponent = static_cast<std::int32_t>(bits - 0x3F3504F3u) >> 23;
  const float f = std::bit_cast<float>(bits - (static_cast<std::uint32_t>(exponent) << 23)) - 1.0f;
  const float n = static_cast<float>(exponent) - select(is_subnormal, 23.0f, 0.0f);
  float p = 0.0674723610f;
  p = std::fma(p, f, -0.116751619f);
  p = std::fma(p, f, 0.118875846f);
  p = std::fma(p, f, -0.124056362f);
  p = std::fma(p, f, 0.142196476f);
  p = std::fma(p, f, -0.166679963f);
  p = std::fma(p, f, 0.200021133f);
  p = std::fma(p, f, -0.250000089f);
  p = std::fma(p, f, 0.333333135f);
  const float square = f * f;
  const float low = std::fma(n, kLn2Low, std::fma(f * square, p, -0.5f * square));
  const float finite = std::fma(n, kLn2High, f + low);
  const float positive = select(x == kInfinity, x, finite);
  const float of_zero = select(x == 0, -kInfinity, std::numeric_limits<float>::quiet_NaN());
  return select(x > 0, positive, of_zero);
}

/// log(1 + e^x) within 3 ulp. With e = e^-|x| and u = 1 + e rounded, log(1 + e) = log(u) +
/// (e - (u - 1)) / u but for terms that are too small.
constexpr float softplus(float x) {
  const float e = exp(-std::fabs(x)), u = 1.0f + e;
  const float rest = log(u) + (e - (u - 1.0f)) / u;
  return select(x > 0, x, select(x != x, x, 0.0f)) + rest;
}

/// The slope is 1 / cosh^2 x = 4 e / (1 + e)^2 with e = e^-2|x|: 1 - tanh^2 x would cancel.
struct Tanh {
  static constexpr float value(float x) { return tanh(x); }
  static constexpr float slope(float x) {
    const float e = exp(-2.0f * std::fabs(x)), d = 1.0f + e;
    return 4.0f * e / (d * d);
  }
};

/// 1 / (1 + e^-x). The slope is s(x) s(-x), which is even: e / (1 + e)^2 with e = e^-|x|.
struct Sigmoid {
  static constexpr float value(float x) { return sigmoid(x); }
  static constexpr float slope(float x) {
    const float e = exp(-std::fabs(x)), d = 1.0f + e;
    return e / (d * d);
  }
};

struct Exp {
  static constexpr float value(float x) { return exp(x); }
  static constexpr float slope(float x) { return exp(x); }
};

struct Log {
  static constexpr float value(float x) { return log(x); }
  static constexpr float slope(float x) { return 1.0f / x; }
};

/// log(1 + e^x).
struct Softplus {
  static constexpr float value(float x) { return softplus(x); }
  static constexpr float slope(float x) { return sigmoid(x); }
};

struct Difference {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float a, float b) const { return a - b; }
};

struct Quotient {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float a, float b) const { return a / b; }
};

/// Of dy, a and b: the gradient of b in a / b.
struct QuotientSlope {
  static constexpr int kNumInputs = 3;
  constexpr float operator()(float dy, float a, float b) const { return -dy * (a / b) / b; }
};

/// a where the condition is not 0, else b.
struct Chosen {
  static constexpr int kNumInputs = 3;
  constexpr float operator()(float condition, float a, float b) const {
    return select(condition != 0, a, b);
  }
};

/// dy where the condition is not 0, else 0; or the other way round.
struct ChosenSlope {
  static constexpr int kNumInputs = 2;
  bool of_first = true;
  constexpr float operator()(float dy, float condition) const {
    return select((condition != 0) == of_first, dy, 0.0f);
  }
};

/// NaN stays NaN.
struct Clamped {
  static constexpr int kNumInputs = 1;
  float low, high;
  constexpr float operator()(float x) const {
    return select(x < low, low, select(x > high, high, x));
  }
};

struct ClampSlope {
  static constexpr int kNumInputs = 2;
  float low, high;
  constexpr float operator()(float dy, float x) const {
    return select(x >= low && x <= high, dy, 0.0f);
  }
};

}  // namespace tessera::ops
