// The rates that plans take for their simulated time: --rates.*.
#pragma once

#include "engine/meta.h"
#include "tools/train/flags.h"

namespace tessera::tools {

struct RatesConfig {
  // Of one rank; engine::MetaRates' own.
  double gflops = 100, memory_gbs = 10, link_gbs = 10, link_latency_us = 20;

  void add_to(FlagSet& flags);
  /// For a run without plan and audit. Throws InvalidArgument if a rate was asked for.
  static void check_unused(const FlagSet& flags);
  engine::MetaRates rates() const;
};

}  // namespace tessera::tools
