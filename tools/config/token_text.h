// How tokens that a model is trained on are read by people.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tools/config/token_data_config.h"
#include "tools/data/token_mix.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

struct TokenText {
  std::optional<Tokenizer> tokenizer = {};  ///< none: tokens are bytes, or nobody knows theirs
  std::int64_t num_val_nbytes = 0;          ///< num_val_nbytes() of the data; 0: not known
};

/// Of `data`, with the tokenizer that made them, if one did, otherwise that of the option, or of
/// the model in `init_from`, whose is not asked for: one that cannot be read, or has fewer tokens
/// than the data, is no reason not to train. Throws IoError for such a one of the option.
TokenText token_text(const TokenDataConfig& config, const std::string& init_from,
                     const TokenMix& data, std::optional<Tokenizer> made_by);

}  // namespace tessera::tools
