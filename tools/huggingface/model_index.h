// model.safetensors.index.json: which files of a folder hold the weights of a model that is in
// shards, and where each tensor is.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/safetensors.h"

namespace tessera::tools {

inline constexpr std::string_view kModelIndex = "model.safetensors.index.json";

/// Names of files in the folder of the index, and the tensors of each.
using ModelIndex = std::map<std::string, std::set<std::string>>;

/// The index at `path`. Throws IoError for one that is malformed, or lists what does not lie in the
/// folder itself. `where`: what errors begin with.
ModelIndex read_model_index(const std::string& path, const std::string& where);

/// Tensors of a file that is to be written.
struct ModelShard {
  std::string name;  ///< in its folder
  std::vector<engine::TensorSpec> tensors;
};

/// Cuts a model into shards of at most `max_nbytes` (0: one file of any size), but for a tensor
/// that is larger, which is one by itself. Tensors stay in order, and one file is
/// model.safetensors.
std::vector<ModelShard> cut_into_shards(std::span<const engine::TensorSpec> tensors,
                                        std::int64_t max_nbytes);
/// The text of their index.
std::string model_index_text(std::span<const ModelShard> shards);

}  // namespace tessera::tools
