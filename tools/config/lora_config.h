// The options of low-rank adapters, which a training has instead of changing the whole model:
// --lora.*.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/cli/flags.h"
#include "tools/cli/run_files.h"
#include "tools/models/family.h"

namespace tessera::tools {

struct LoraConfig {
  std::int64_t rank = 0;  ///< 0: as `from` says, or no adapters
  double alpha = 0;       ///< 0: as `from` says, or 16
  double dropout = 0;
  std::string targets;  ///< names with commas between; empty: as `from` says, or the usual ones
  std::string from;     ///< folder, as it was typed; empty: none

  bool is_on() const { return rank > 0 || !from.empty(); }

  void add_to(FlagSet& flags);
  /// The adapters that a model of `base` gets. Throws InvalidArgument naming the option: for what
  /// would have no effect, for targets that the model does not have, or for other adapters than
  /// those in `from`; IoError as read_lora().
  LoraOptions options(const ModelConfig& base) const;
  std::string folder() const;  ///< `from`, to be read
  /// What is read; none without `from`.
  std::vector<RunFile> files_read() const;
};

}  // namespace tessera::tools
