// The rates that plans take for their simulated time: --rates.*.
#pragma once

#include "engine/dtype.h"
#include "engine/meta.h"
#include "tools/cli/flags.h"

namespace tessera::tools {

struct RatesConfig {
  // Of one rank.
  double gflops = 0, memory_gbs = 0, link_gbs = 0;  ///< 0: of the device
  double link_latency_us = 20;
  double host_link_gbs = 10, host_memory_gbs = 10;

  void add_to(FlagSet& flags);
  /// For a run without plan, audit and memory_budget. Throws InvalidArgument if a rate was asked
  /// for.
  static void check_unused(const FlagSet& flags);
  /// Rates of the device are on GPUs those that NVIDIA publishes of an H100 SXM, for products with
  /// operands of `dtype`, and otherwise those of a core, engine::MetaRates' own.
  engine::MetaRates rates(bool on_gpus, engine::DType dtype) const;
};

}  // namespace tessera::tools
