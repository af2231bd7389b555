// The options of communication hooks: --comm.hook and --powersgd.*; see shard/hooks/hooks.h.
#pragma once

#include <cstdint>
#include <string>

#include "shard/hooks/hooks.h"
#include "shard/options.h"
#include "tools/cli/flags.h"

namespace tessera::tools {

struct CommConfig {
  std::string hook = "none";
  shard::PowerSgdOptions powersgd = {};

  void add_to(FlagSet& flags);
  /// Throws InvalidArgument for what contradicts the rest of the configuration or would have no
  /// effect. `flags` tells which were asked for.
  void validate(const FlagSet& flags, const std::string& strategy,
                const shard::Precision& precision, double grad_clip, std::int64_t max_skips) const;
  shard::HookOptions options() const;
  /// What ranks must agree on; empty for none.
  std::string text() const;
};

}  // namespace tessera::tools
