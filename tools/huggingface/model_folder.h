// What lies in a folder that should hold a model: so that another kind of model, or of file, is
// refused with what it is and what to do.
#pragma once

#include <string>
#include <string_view>

#include "engine/io/safetensors.h"

namespace tessera::tools {

/// Throws IoError that says what to do when `folder` is a file, or not there, or a checkpoint, or
/// has weights in other formats alone. Says nothing of an empty folder, or one with safetensors.
void check_model_folder(const std::string& folder);

/// Whether nothing is there under `path`.
bool is_missing(const std::string& path);

/// Throws IoError when `text`, of the file at `path` that should be JSON, is of another known kind.
void check_is_json(std::string_view text, const std::string& path);

/// Throws IoError as SafetensorsFile, and when the file is of another known kind.
engine::SafetensorsFile open_weights(std::string path);

}  // namespace tessera::tools
