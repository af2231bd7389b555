// The options of checkpoints: --checkpoint.* and --resume; see shard/checkpoint/checkpointer.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tools/cli/flags.h"
#include "tools/cli/run_files.h"

namespace tessera::tools {

struct CheckpointConfig {
  bool is_offered = true;  ///< the options are; no flag
  std::int64_t every = 0;  ///< steps; 0: none are saved
  std::string dir;         ///< empty: checkpoints in the output folder
  std::int64_t keep = 3;   ///< 0: all
  bool async = true;
  bool strict = true;
  std::string resume = "none";

  bool saves() const { return every > 0; }
  bool resumes() const { return resume != "none"; }

  void add_to(FlagSet& flags);
  /// Throws InvalidArgument for what would have no effect. `flags` tells which were asked for.
  void validate(const FlagSet& flags) const;
  /// Where checkpoints are, with the output folder `out`.
  std::string folder(const std::string& out) const;
  /// Throws InvalidArgument when one of `files` is where checkpoints are, this run's or those that
  /// it resumes.
  void check_apart(const std::string& out, std::span<const RunFile> files) const;
};

}  // namespace tessera::tools
