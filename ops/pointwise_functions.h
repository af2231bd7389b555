// What an element of a pointwise op is, given the input elements at its index; see ops/pointwise.h.
// Private to ops.
#pragma once

#include "ops/activation.h"

namespace tessera::ops {

struct Scaled {
  static constexpr int kNumInputs = 1;
  float factor;
  constexpr float operator()(float x) const { return factor * x; }
};

struct Sum {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float a, float b) const { return a + b; }
};

struct Product {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float a, float b) const { return a * b; }
};

struct Gated {
  static constexpr int kNumInputs = 2;
  constexpr float operator()(float gate, float up) const { return Silu::value(gate) * up; }
};

struct GateSlope {
  static constexpr int kNumInputs = 3;
  static constexpr bool kSumsColumns = true;
  constexpr float operator()(float dy, float gate, float up) const {
    return dy * up * Silu::slope(gate);
  }
};

struct UpSlope {
  static constexpr int kNumInputs = 2;
  static constexpr bool kSumsColumns = true;
  constexpr float operator()(float dy, float gate) const { return dy * Silu::value(gate); }
};

}  // namespace tessera::ops
