// What elements of losses are, and their slopes, on the CPU and in CUDA kernels; see
// ops/pointwise.h. Private to ops.
#pragma once

#include "ops/elementwise/functions.h"

namespace tessera::ops {

struct SquareTerm {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float x, float t) const { return (x - t) * (x - t); }
};

/// Of dy, x and t; the slope of t is that of x with the two exchanged.
struct SquareSlope {
  static constexpr int kNumInputs = 3;
  constexpr float operator()(float dy, float x, float t) const { return 2.0f * dy * (x - t); }
};

/// max(x, 0) - x t + log(1 + e^-|x|): equals -t log(s) - (1 - t) log(1 - s).
struct BceTerm {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float x, float t) const {
    const float rest = softplus(-std::fabs(x));
    return (select(x > 0, x, select(x != x, x, 0.0f)) - x * t) + rest;
  }
};

/// Of dy, x and t. (1 - t) s - t (1 - s), which is s - t without its cancellation.
struct BceSlope {
  static constexpr int kNumInputs = 3;
  constexpr float operator()(float dy, float x, float t) const {
    return dy * ((1.0f - t) * sigmoid(x) - t * sigmoid(-x));
  }
};

/// Of a log-probability and a target.
struct KlTerm {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float log_prob, float t) const {
    return select(t == 0, 0.0f, t * (log(t) - log_prob));
  }
};

/// Of dy and a target.
struct KlSlope {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float dy, float t) const { return -dy * t; }
};

/// 1 / x, and 0 for 0: what a mean over weights of 0 is multiplied with.
struct InverseOrZero {
  static constexpr int kNumInputs = 1;
  constexpr float operator()(float x) const { return select(x == 0, 0.0f, 1.0f / x); }
};

}  // namespace tessera::ops
