// What an element of softmax or log_softmax is, given two numbers of its row; on the CPU and on a
// GPU. Private to ops.
//
// value(shifted, norm) of y, where shifted is x - max, and norm the sum of exp(shifted) or its
// logarithm; term(dy, y) of what backward sums over a row, and slope(dy, y, sum) of dx.
#pragma once

#include <string_view>

#include "ops/vector_math.h"

namespace tessera::ops {

struct Softmax {
  static constexpr std::string_view kName = "softmax", kForward = "softmax.forward",
                                    kBackward = "softmax.backward";
  static constexpr bool kIsLog = false;
  static constexpr double kBackwardFlops = 4;
  static constexpr float value(float shifted, float norm) { return exp(shifted) / norm; }
  static constexpr float term(float dy, float y) { return dy * y; }
  static constexpr float slope(float dy, float y, float sum) { return y * (dy - sum); }
};

struct LogSoftmax {
  static constexpr std::string_view kName = "log_softmax", kForward = "log_softmax.forward",
                                    kBackward = "log_softmax.backward";
  static constexpr bool kIsLog = true;
  static constexpr double kBackwardFlops = kExpFlops + 3;
  static constexpr float value(float shifted, float norm) { return shifted - norm; }
  static constexpr float term(float dy, float) { return dy; }
  static constexpr float slope(float dy, float y, float sum) { return dy - exp(y) * sum; }
};

/// Of an element: max, difference, exponential, sum, and the quotient or the second difference.
inline constexpr double kSoftmaxFlops = kExpFlops + 4;

}  // namespace tessera::ops
