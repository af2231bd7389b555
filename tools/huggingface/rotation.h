// How a model's heads turn by position, as a config.json of Hugging Face transformers says it.
#pragma once

#include <string>

#include "tools/huggingface/config_file.h"

namespace tessera::tools {

/// What makes heads turn slower: rope_scaling, or rope_parameters since transformers 5.
struct RopeFileScaling {
  std::string type = "default";  ///< default, linear or llama3
  double factor = 1;
  double low = 1, high = 4, original_positions = 0;  ///< of llama3

  bool operator==(const RopeFileScaling&) const = default;
};

struct FileRotation {
  double theta = 10000;
  double part = 1;  ///< of each head, from its first element on, that turns
  RopeFileScaling scaling = {};

  bool operator==(const FileRotation&) const = default;
};

/// Where a family's config.json says its rotation, besides rope_parameters and rope_scaling.
struct RotationKeys {
  const char* theta = "rope_theta";
  const char* part = "partial_rotary_factor";
  double part_unless_there = 1;
  bool may_be_partial = false;
};

/// Throws IoError naming file and key for a rotation that ops::rope() does not compute, and for one
/// that is said in several places and differs.
FileRotation read_rotation(const ConfigFile& file, const RotationKeys& keys);

/// The value of rope_scaling in a config.json.
std::string rope_scaling_text(const RopeFileScaling& scaling);

/// check_as_saved() of each key; `theta` and `part`: what their keys are called.
void check_as_saved(const FileRotation& got, const FileRotation& saved, const std::string& where,
                    const RotationKeys& keys, const FolderConfig& folder);

}  // namespace tessera::tools
