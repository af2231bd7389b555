// The options of the model that a training leaves: --save.*.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/cli/flags.h"
#include "tools/cli/run_files.h"
#include "tools/huggingface/model_writer.h"

namespace tessera::tools {

struct SaveConfig {
  std::string final;  ///< folder, as it was typed; empty: no model is saved
  double shard_gib = 46;

  bool is_on() const { return !final.empty(); }

  /// `titles`: of the families of models that there are.
  void add_to(FlagSet& flags, std::string_view titles);
  /// Throws InvalidArgument for what would have no effect. `flags` tells which were asked for.
  void validate(const FlagSet& flags) const;
  std::string folder() const;
  /// What is written, of a model or of its adapters alone; none if nothing is saved.
  std::vector<RunFile> files(bool of_adapters = false) const;
  /// That what `files` has is there already, and will be replaced; empty: it is not.
  std::string warning(bool of_adapters) const;
  /// How to save a model that began from the folder `init_from`, as it was typed; empty: none.
  SaveOptions options(const std::string& init_from) const;
};

}  // namespace tessera::tools
