// The rates that plans take for their simulated time: --rates.*.
#pragma once

#include "engine/dtype.h"
#include "engine/meta.h"
#include "tools/train/flags.h"

namespace tessera::tools {

struct RatesConfig {
  // Of one rank; engine::MetaRates' own, those of a core.
  double gflops = 100, memory_gbs = 10, link_gbs = 10, link_latency_us = 20;
  double host_link_gbs = 10, host_memory_gbs = 10;

  void add_to(FlagSet& flags);
  /// For a run without plan, audit and memory_budget. Throws InvalidArgument if a rate was asked
  /// for.
  static void check_unused(const FlagSet& flags);
  /// On GPUs sets the rates that `flags` do not give to those that NVIDIA publishes of an H100 SXM;
  /// products have operands of `dtype`.
  void choose(const FlagSet& flags, bool on_gpus, engine::DType dtype);
  engine::MetaRates rates() const;
};

}  // namespace tessera::tools
