// The options that say which model is trained: --model.*, and what --init.from names.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tools/cli/flags.h"
#include "tools/models/family.h"

namespace tessera::tools {

struct ModelFlags {
  std::string preset = "small";
  // 0: as the preset, or the model that init.from names, says.
  std::int64_t layers = 0, heads = 0, dim = 0, seq = 0, vocab = 0;
  std::map<std::string, std::int64_t> numbers = {};  ///< of families alone, by name
  double dropout = 0;

  void add_to(FlagSet& flags, const Families& families);
  /// The model's sizes and dropout: the preset, overridden by flags, or the sizes in the folder
  /// `init_from`, as it was typed, which flags must fit: the same, and sequences that are no longer
  /// than its positions. Throws InvalidArgument or IoError naming the option.
  ModelConfig config(const std::string& init_from, const Families& families) const;
};

}  // namespace tessera::tools
