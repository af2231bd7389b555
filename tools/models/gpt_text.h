// The sizes of a Gpt as a checkpoint keeps them: a JSON object.
#pragma once

#include <string>
#include <string_view>

#include "tools/models/gpt.h"

namespace tessera::tools {

/// {"model":"gpt2","layers":3,...}: all but dropout, which is training's.
std::string to_text(const GptConfig& config);
/// The other way round. Throws IoError naming `path` and the key if it is of another model.
GptConfig parse_gpt_text(std::string_view text, std::string_view path);

}  // namespace tessera::tools
