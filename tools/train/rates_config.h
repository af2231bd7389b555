// The rates that plans take for their simulated time: --rates.*.
#pragma once

#include "engine/meta.h"
#include "tools/train/flags.h"

namespace tessera::tools {

struct RatesConfig {
  // Of one rank; engine::MetaRates' own.
  double gflops = 100, memory_gbs = 10, link_gbs = 10, link_latency_us = 20;
  double host_link_gbs = 10, host_memory_gbs = 10;

  void add_to(FlagSet& flags);
  /// For a run without plan, audit and memory_budget. Throws InvalidArgument if a rate was asked
  /// for.
  static void check_unused(const FlagSet& flags);
  engine::MetaRates rates() const;
};

}  // namespace tessera::tools
