// The options of what lies in memory of the host: --offload.*; see shard/offload.h.
#pragma once

#include <cstdint>
#include <string>

#include "shard/options.h"
#include "shard/placement.h"
#include "tools/cli/flags.h"
#include "tools/config/device_config.h"

namespace tessera::tools {

/// See shard::OffloadOptions.
struct OffloadConfig {
  double parameters = 0, gradients = 0, optimizer = 0;
  std::int64_t threads = 0;  ///< 0: as many as usable cores, shared by the ranks of a process

  bool any() const { return parameters > 0 || gradients > 0 || optimizer > 0; }
  /// Of each of `num_local` ranks of this process.
  int threads_of_rank(const CpuConfig& cpu, int num_local) const;

  void add_to(FlagSet& flags);
  /// Throws InvalidArgument for what would have no effect with what `strategy` stands for.
  void validate(const shard::Placement& placement, const std::string& strategy,
                const shard::Precision& precision) const;
};

}  // namespace tessera::tools
