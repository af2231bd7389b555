// What a GPU can do at most, as far as our own kernels show it: what the kernels of a step are
// compared with.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tools/bench/report.h"
#include "tools/bench/training/training.h"

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

/// The matrix products of steps of `rows`, with the vocabulary as it is and as long as a multiple
/// of 128: by the first algorithm that cublasLt proposes, and by the fastest. Ends when `is_late`.
void measure_gemms(const std::vector<TrainingRow>& rows, const Ceilings& ceilings,
                   const std::function<bool()>& is_late, BenchReport& report);

}  // namespace tessera::tools
