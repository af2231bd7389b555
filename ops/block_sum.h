// Sums of long rows on the CPU, in an order that is a function of their length alone. Private to
// ops.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/lanes.h"

namespace tessera::ops {

/// Terms that are added up in f32.
inline constexpr std::int64_t kSumBlock = 1024;

/// term(0) + ... + term(numel - 1): lane_sum() of each block of kSumBlock terms, and these sums are
/// added up in double.
template <class Term>
double block_sum(std::int64_t numel, Term term) {
  double sum = 0;
  for (std::int64_t first = 0; first < numel; first += kSumBlock) {
    sum += double{lane_sum(std::min(kSumBlock, numel - first),
                           [=](std::int64_t i) { return term(first + i); })};
  }
  return sum;
}

}  // namespace tessera::ops
