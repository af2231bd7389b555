// What a GPU can do at most, as far as our own kernels show it: what the kernels of a step are
// compared with.
#pragma once

#include <cstdint>

#include "tools/bench/report.h"

namespace tessera::tools {

/// What GPU 0 reaches. Bytes count once for each read and once for each write.
struct Ceilings {
  double gb_per_s = 0;         ///< the better of a copy and an addition
  double f32_gflop_per_s = 0;  ///< of a matrix product
  double bf16_gflop_per_s = 0;

  /// How much of the device a kernel uses, in percent, that works at these rates: of the memory or
  /// of the bf16 product, whichever is more.
  double percent(double gflop_per_s, double gb_per_s) const;
};

/// Products of normal (side, side) matrices; copies and additions of 16 side^2 bytes. Medians of
/// `num_samples`. Throws DeviceError without a GPU.
Ceilings measure_ceilings(std::int64_t side, std::int64_t num_samples, BenchReport& report);

}  // namespace tessera::tools
