// How the names of a file's tensors differ from those that a model has, in few lines.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/safetensors.h"

namespace tessera::tools {

/// `missing`: of the model, not in the file; `unexpected`: the other way round. First what all
/// names of the file have before the model's, if they do; then names that are nearly the same side
/// by side, the nearest first; then the others. Eight lines at most, and how many are left out.
/// `own`: a prefix that files may have ("transformer."), which need not go.
std::vector<std::string> name_differences(std::span<const engine::TensorSpec> missing,
                                          std::span<const engine::TensorSpec> unexpected,
                                          std::string_view own);

}  // namespace tessera::tools
