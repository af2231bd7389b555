// Which tokens end a text, as the files of a model say.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

/// eos_token_id of generation_config.json in `folder`; where it has none that of config.json, and
/// where this has none either tokenizer.eos(). A number or a list of numbers; maybe none. Throws
/// IoError naming file and key for what is no id of a token.
std::set<std::int32_t> read_eos_tokens(const std::string& folder, const Tokenizer& tokenizer);

}  // namespace tessera::tools
