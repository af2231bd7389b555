// The lines of what was measured, from its figures alone.
#pragma once

#include "engine/meta.h"
#include "tools/doctor/check.h"

namespace tessera::tools {

/// One thread's matrix products, of f32 and of bf16, compared with the `peak` of what it multiplies
/// and adds in registers, in GFLOP/s. kWarn below half of the peak. A peak below the product was
/// measured while other programs ran, and is left out.
Check product_line(double f32, double peak, double bf16);

/// What one collective took.
struct CollectiveTime {
  const char* name;  ///< "all_gather"
  std::size_t num_ranks;
  double nbytes;       ///< that it moves, of a rank
  double ms, copy_ms;  ///< of it, and of a copy of as many bytes by every rank at once
};
/// kWarn where thread ranks take over four times as long as they take to copy, GPUs 500 times.
Check collective_line(const CollectiveTime& time, bool on_gpus);

/// What plan takes as --rates.*, of each of `num_ranks` ranks.
Check rates_line(int num_ranks, const engine::MetaRates& f32);

}  // namespace tessera::tools
