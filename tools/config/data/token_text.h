// How tokens that a model is trained on are read by people.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tools/config/data/token_data_config.h"
#include "tools/data/token_mix.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

struct TokenText {
  std::optional<Tokenizer> tokenizer = {};  ///< none: tokens are bytes, or nobody knows theirs
  std::int64_t num_val_nbytes = 0;          ///< num_val_nbytes() of the data; 0: not known
};

/// The tokenizer of the option, or else of the model in `init_from`, whose is not asked for: none
/// where that cannot be read, or has fewer tokens than `data`. Throws IoError for such a one of the
/// option.
std::optional<Tokenizer> tokenizer_of(const TokenDataConfig& config, const std::string& init_from,
                                      const TokenMix& data);

/// How `data` are read: with the tokenizer that made them, if one did, and otherwise
/// tokenizer_of(). Throws IoError as that does, and for a file of a mix with tokens that `made_by`
/// does not have.
TokenText token_text(const TokenDataConfig& config, const std::string& init_from,
                     const TokenMix& data, std::optional<Tokenizer> made_by);

}  // namespace tessera::tools
